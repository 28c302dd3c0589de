"""The trainer's end of shared memory: its gradients are read where they lie, parameters copied from where they are.

trainer --its gradient vectors, read only--> pserver --the blocks' memory, read only--> trainer
"""

from __future__ import annotations

import sys

from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import BadFrame, TriremeError
from trireme_shared.serving.transport.shared_memory import (
    ALIGNMENT_BYTES,
    Borrower,
    Lender,
    Offers,
    Place,
    Region,
    place_of,
)

log = telemetry.logger("trainer_memory")


class TrainerMemory:
    """Of one connection. `on`: each reads the other's memory. `unreadable`: we cannot map what the pserver offers."""

    def __init__(self, name: str) -> None:
        self.unreadable = False
        self._name = name
        self.lender = Lender()
        self._borrower: Borrower | None = None
        self._lends = False

    @property
    def on(self) -> bool:
        return self._borrower is not None

    def begin(self, peer: int, offers: Offers) -> None:
        """The pserver, process `peer`, agreed. Raises InvalidArgument, TooLarge: its memory cannot be mapped."""
        borrower = Borrower(peer)
        self._learn(borrower, offers)
        self._borrower, self._lends = borrower, True

    def learn(self, offers: Offers) -> None:
        """Raises as `begin`, BadFrame before it."""
        self._learn(self._known(), offers)

    def payload(self, place: Place, sent: int) -> memoryview:
        """What a pulled block refers to, which has `sent` bytes of its own. Raises BadFrame, InvalidArgument."""
        return self._known().payload(place, sent)

    def close(self) -> None:
        """The connection is over: the peer's memory is unmapped at once, not when the interpreter finds what refers to the connection. Each mapping has a
        descriptor, and keeps the memory of a peer that has ended."""
        self._borrower, self._lends = None, False

    # ------------------------------------------------------------ lending gradients

    def home_of(self, payload: memoryview) -> tuple[Region, int] | None:
        """Where the pserver could read it, after it was offered the region; None: it has to be sent."""
        home = place_of(payload) if self._lends else None
        return home if home is not None and home[1] % ALIGNMENT_BYTES == 0 else None

    def lend_no_more(self, cause: TriremeError) -> None:
        log.info("gradients_not_shared", peer=self._name, cause=cause.message)
        self._lends = False

    # ------------------------------------------------------------ parts

    def _known(self) -> Borrower:
        if self._borrower is None:
            raise BadFrame(f"{self._name} referred to its memory, which it does not share")
        return self._borrower

    def _learn(self, borrower: Borrower, offers: Offers) -> None:
        try:
            borrower.learn(offers, sys.maxsize)
        except TriremeError:
            self.unreadable = True
            raise

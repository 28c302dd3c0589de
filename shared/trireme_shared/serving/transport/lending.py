"""Memory that the two ends of one UNIX stream share: each numbers its own regions, and knows the other's by their numbers.

Lender:   region --number--> offered once, forgotten when it is gone       Borrower:  [number, offset, size] --> bytes

Nobody writes into another's memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from trireme_shared.protocol.errors import BadFrame, TooLarge
from trireme_shared.protocol.records.record import Record
from trireme_shared.serving.transport.shared_memory import Mapped, Offer, Region, open_offered

MAX_MEMORIES = 256  # of one peer
NOTHING = memoryview(bytearray())  # the payload of a block that refers to memory
Place = tuple[int, int, int]
"""Number of a memory, offset, size in bytes."""


class Offers(Record):
    """New memories of the sender, and numbers that it does not use any more."""

    offers: tuple[Offer, ...] = ()
    forget: tuple[int, ...] = ()


class Lender:
    """Our regions that the peer was told of."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Region]] = {}
        self._numbers: weakref.WeakKeyDictionary[Region, int] = weakref.WeakKeyDictionary()
        self._next = 0

    def number(self, region: Region) -> int | None:
        """None: the peer does not know it."""
        return self._numbers.get(region)

    def offers(self, regions: Iterable[Region]) -> Offers:
        """What the peer must be told before a frame refers to these regions."""
        new = tuple(self._offer(region) for region in regions if region not in self._numbers)
        return Offers(offers=new, forget=self._gone() if new else ())

    def _offer(self, region: Region) -> Offer:
        number, self._next = self._next, self._next + 1
        self._numbers[region], self._known[number] = number, weakref.ref(region)
        return region.offer(number)

    def _gone(self) -> tuple[int, ...]:
        """Numbers that the peer can forget: the regions do not exist any more."""
        dead = tuple(number for number, region in self._known.items() if region() is None)
        for number in dead:
            del self._known[number]
        return dead


class Borrower:
    """The memory of one peer."""

    def __init__(self, peer: int) -> None:
        self._peer = peer
        self._mapped: dict[int, Mapped] = {}

    def __repr__(self) -> str:
        return f"<Borrower of process {self._peer}: {len(self._mapped)} memories>"

    def learn(self, offers: Offers, at_most: int) -> None:
        """Map the peer's new regions, of `at_most` bytes each. Raises InvalidArgument, TooLarge: the rest stay unknown."""
        for number in offers.forget:
            self._mapped.pop(number, None)  # its last view unmaps it
        for offer in offers.offers:
            if offer.memory in self._mapped or len(self._mapped) >= MAX_MEMORIES:
                msg = f"memory {offer.memory} is known already, or one of more than {MAX_MEMORIES}"
                raise TooLarge(msg)
            self._mapped[offer.memory] = open_offered(offer, self._peer, at_most)

    def payload(self, place: Place, sent: int) -> memoryview:
        """The bytes there, read only, of a block that has `sent` bytes of its own. Raises BadFrame, InvalidArgument."""
        number, offset, size = place
        mapped = self._mapped.get(number)
        if mapped is None:
            msg = f"memory {number} was never offered: it is one of {sorted(self._mapped)[:10]}"
            raise BadFrame(msg)
        if sent:
            msg = f"a block refers to memory and has {sent} bytes of its own: expected only one of both"
            raise BadFrame(msg)
        return mapped.part(offset, size)


def place_in(header: dict[str, Any]) -> Place | None:
    """Where a block's header says that its payload lies; None: the payload follows. Raises BadFrame."""
    at = header.pop("at", None)
    if at is None:
        return None
    if not isinstance(at, list) or len(at) != 3 or not all(type(number) is int for number in at):
        msg = f"a reference is {str(at)[:80]}: expected [memory, offset, size]"
        raise BadFrame(msg)
    return at[0], at[1], at[2]

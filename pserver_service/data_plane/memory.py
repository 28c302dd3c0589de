"""Memory shared with trainers on this host: blocks lie where they can read them, gradients are read where they lie.

    trainer --its gradient vectors, read only--> pserver --the blocks' memory, read only--> trainer

Nobody writes into another's memory. What a trainer was given a reference to is retained until it says that it took it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from pserver_service.core.store import Store
from shared.blocks.buffers import Buffer, Home
from shared.errors import BadFrame
from shared.runtime import clock, telemetry
from shared.wire import codec
from shared.wire.lending import Borrower, Lender, Offers, Place
from shared.wire.shared_memory import ALIGNMENT_BYTES, PAGE_BYTES, Region

CHUNK_BYTES = 64 << 20  # at least, and a quarter of what there is: few regions, however large the model
WINDOW_BYTES = 8 << 20  # lent to one trainer at most: it copies while we compute
MAX_LENT = 1024  # blocks

log = telemetry.logger("pserver.sharing")


class Chunks:
    """Memory for one pool, cut from regions, which trainers on this host may read; private memory where there are none. Block
    by block malloc would take a fifth more than it gives."""

    def __init__(self) -> None:
        self._region: Region | None = None
        self._used = self._total = 0
        self._possible = True

    def __call__(self, size: int) -> tuple[torch.Tensor, Home | None]:
        size_there = -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if self._region is None or self._used + size_there > len(self._region):
            self._begin(max(size_there, CHUNK_BYTES, self._total // 4))
        if self._region is None or not size:
            return torch.empty(size, dtype=torch.uint8), None
        region, offset = self._region, self._used
        self._used += size_there
        return torch.frombuffer(region, dtype=torch.uint8, count=size, offset=offset), (region, offset)

    def _begin(self, size: int) -> None:
        self._region, self._used = None, 0
        if not self._possible:
            return
        try:
            self._region = Region.create(size)
            self._total += size
        except OSError as error:
            self._possible = False
            log.info("memory_not_shared", cause=f"{type(error).__name__}: {error}")


class Sharing:
    """Of one connection. `peer` gives the trainer's process, or raises why memory cannot be shared with it."""

    def __init__(self, peer: Callable[[], int]) -> None:
        self._peer = peer
        self._lender = Lender()
        self._borrower: Borrower | None = None
        self._lent: dict[int, deque[Buffer]] = {}
        self._bytes = self._blocks = 0
        self.moved = clock.monotonic()  # when the first of what is lent was lent, or something was taken

    def __repr__(self) -> str:
        return f"<Sharing: {self._blocks} blocks lent, {self._borrower!r}>"

    def share(self, message: codec.Fields, store: Store) -> Offers:
        """The trainer's regions from now on; ours that it does not know. Raises Unauthorized, InvalidArgument, TooLarge: none
        or only some of its regions are known then."""
        given = codec.read(Offers, message)
        if self._borrower is None:
            self._borrower = Borrower(self._peer())
        for number in given.forget:
            self._borrower.forget(number)
        at_most = -(-store.layout.vector_bytes // PAGE_BYTES) * PAGE_BYTES
        for offer in given.offers:
            self._borrower.open(offer, at_most)
        homes = [state.current.home for state in store.blocks.values() if state.current.home is not None]
        return self._offers({region: None for region, _ in homes})

    def payload(self, place: Place, sent: int) -> memoryview:
        """What a push's block refers to, which has `sent` bytes of its own; read only. Raises BadFrame, InvalidArgument."""
        if self._borrower is None or sent:
            msg = f"a reference with {sent} bytes: share memory first, and send none with it"
            raise BadFrame(msg)
        return self._borrower.part(place)

    # ------------------------------------------------------------ what pulls get

    @property
    def full(self) -> bool:
        return self._bytes >= WINDOW_BYTES or self._blocks >= MAX_LENT

    @property
    def lends(self) -> bool:
        """Whether something is lent that was not taken yet."""
        return self._blocks > 0

    def lend(self, number: int, buffer: Buffer) -> tuple[Offers, Place] | None:
        """Where pull `number` finds a retained buffer, which is ours to release from now on, and what it must be offered
        before; None: it has to be sent."""
        if self._borrower is None or buffer.home is None:
            return None
        region, offset = buffer.home
        new = self._offers([region])
        memory = self._lender.number(region)
        assert memory is not None
        if not self._blocks:
            self.moved = clock.monotonic()
        self._lent.setdefault(number, deque()).append(buffer)
        self._bytes += buffer.view.nbytes
        self._blocks += 1
        return new, (memory, offset, buffer.view.nbytes)

    def took(self, number: int, count: Any) -> None:
        """Pull `number`, which may have ended, has taken the next `count` blocks that it was lent. Raises BadFrame."""
        lent = self._lent.get(number, deque())
        if type(count) is not int or not 0 < count <= len(lent):
            msg = f"pull {number} took {str(count)[:20]} blocks of {len(lent)} that it was lent"
            raise BadFrame(msg)
        for _ in range(count):
            self._give_back(lent.popleft())
        if not lent:
            del self._lent[number]
        self.moved = clock.monotonic()

    def close(self) -> None:
        """Whatever was lent is ours again: the connection is over, so nobody believes what it still reads."""
        for lent in self._lent.values():
            for buffer in lent:
                self._give_back(buffer)
        self._lent.clear()
        self._borrower = None

    def _give_back(self, buffer: Buffer) -> None:
        self._bytes -= buffer.view.nbytes
        self._blocks -= 1
        buffer.release()

    def _offers(self, regions: Iterable[Region]) -> Offers:
        """What the trainer does not know yet of these."""
        new = tuple(self._lender.offer(region) for region in regions if self._lender.number(region) is None)
        return Offers(offers=new, forget=tuple(self._lender.gone()) if new else ())

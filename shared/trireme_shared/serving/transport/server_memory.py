"""The server's end of shared memory: blocks are read where they lie here, gradients where they lie at the peer.

    peer --its gradient vectors, read only--> server --the blocks' memory, read only--> peer

A buffer that the peer was referred to is retained until it says that it took the block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from trireme_shared.blocks.buffers import Buffer
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import BadFrame
from trireme_shared.serving.transport.lending import Borrower, Lender, Offers, Place
from trireme_shared.serving.transport.row_memory import AnswerMemory
from trireme_shared.serving.transport.shared_memory import PAGE_BYTES, Region

WINDOW_BYTES = 8 << 20  # lent to one peer at most: it copies while we compute
MAX_LENT = 1024  # blocks


class ServerMemory:
    """Of one connection. `peer` gives the process at its other end, or raises why memory cannot be shared with it. `answers`: of the server."""

    def __init__(self, peer: Callable[[], int], answers: AnswerMemory) -> None:
        self._peer, self._answers = peer, answers
        self._lender = Lender()
        self._borrower: Borrower | None = None
        self._lent: dict[int, deque[Buffer]] = {}
        self._bytes = self._blocks = 0
        self.moved = clock.monotonic()  # when the first of the lent blocks was lent, or the last one was taken

    def __repr__(self) -> str:
        return f"<ServerMemory: {self._blocks} blocks lent, {self._borrower!r}>"

    def share(self, given: Offers, regions: Iterable[Region], most_bytes: int) -> Offers:
        """Map the peer's regions, of at most `most_bytes` each; returns offers of `regions`, if it is the first call: later ones are offered
        when something is lent, since what was lent must not overtake the offer.
        Raises Unauthorized, InvalidArgument, TooLarge: none or only some of its regions are mapped then."""
        first = self._borrower is None
        if self._borrower is None:
            self._borrower = Borrower(self._peer())
        self._borrower.learn(given, -(-most_bytes // PAGE_BYTES) * PAGE_BYTES)
        return self._lender.offers(regions) if first else Offers()

    def payload(self, place: Place, sent: int) -> memoryview:
        """What a push's block refers to, which has `sent` bytes of its own; read only. Raises BadFrame, InvalidArgument."""
        if self._borrower is None:
            raise BadFrame("a block refers to memory: share it first")
        return self._borrower.payload(place, sent)

    # ------------------------------------------------------------ blocks for pulls

    @property
    def full(self) -> bool:
        return self._bytes >= WINDOW_BYTES or self._blocks >= MAX_LENT

    @property
    def lends(self) -> bool:
        """Whether a block is lent that was not taken yet."""
        return self._blocks > 0

    def lend_rows(self, number: int, rows: memoryview) -> tuple[Offers, Place] | None:
        """Where lookup `number` finds a copy of its rows, as `lend`; None: they have to be sent."""
        if self._borrower is None or self.full or (buffer := self._answers.copied(rows)) is None:
            return None
        lent = self.lend(number, buffer, rows.nbytes)
        if lent is None:
            buffer.release()
        return lent

    def lend(self, number: int, buffer: Buffer, size: int | None = None) -> tuple[Offers, Place] | None:
        """Where pull `number` finds a retained buffer, or its first `size` bytes; it is released here when the peer took it. With the offers that
        the peer needs before. None: the buffer has to be sent."""
        if self._borrower is None or buffer.home is None:
            return None
        region, offset = buffer.home
        new = self._lender.offers((region,))
        memory = self._lender.number(region)
        assert memory is not None
        if not self._blocks:
            self.moved = clock.monotonic()
        self._lent.setdefault(number, deque()).append(buffer)
        self._bytes += buffer.view.nbytes
        self._blocks += 1
        return new, (memory, offset, buffer.view.nbytes if size is None else size)

    def took(self, number: int, count: Any) -> None:
        """Pull `number`, which may have ended, has taken the next `count` blocks that were lent to it. Raises BadFrame."""
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
        """Everything lent is ours again: the connection is over, so the peer drops what it still reads."""
        for lent in self._lent.values():
            for buffer in lent:
                self._give_back(buffer)
        self._lent.clear()
        self._borrower = None

    def _give_back(self, buffer: Buffer) -> None:
        self._bytes -= buffer.view.nbytes
        self._blocks -= 1
        buffer.release()

"""Calls that are open on a stream of a server of blocks, and the headers of the blocks that they bring: the same in every step, so they are made once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import lru_cache

from trireme_shared.blocks.buffers import Buffer
from trireme_shared.protocol.wire import codec
from trireme_shared.serving.core.calls import OpenPull
from trireme_shared.serving.core.pushes import OpenPush
from trireme_shared.serving.transport.lending import Place


@dataclass(slots=True)
class Push:
    """`pushing` None: it is refused, its blocks are skipped. `memory`: where one is received. `ahead`: those that are not applied yet. `ended`: no more will come. `keeping`: copies what waits in the
    sender's memory, soon."""

    number: int
    pushing: OpenPush | None = None
    memory: Buffer | None = None
    blocks_left: int = 0
    ahead: int = 0
    ended: bool = False
    keeping: asyncio.Handle | None = None

    def close(self) -> None:
        if self.memory is not None:
            self.memory.release()
            self.memory = None
        if self.pushing is not None:
            self.pushing.close()
        if self.keeping is not None:
            self.keeping.cancel()


@dataclass(slots=True)
class Pull:
    pulling: OpenPull
    expiry: asyncio.TimerHandle
    queued: bool = True
    expired: bool = False


@lru_cache(maxsize=codec.KNOWN_HEADERS)
def head_of(number: int, block: int, dtype: str | None, size: int, at: Place | None = None) -> bytes:
    """The header of a block that a pull gets; it is the same in every step."""
    fields: codec.Fields = {"id": number, "block": block}
    return codec.encode_block(fields | ({"dtype": dtype} if dtype else {}) | ({"at": at} if at else {}), size)


@lru_cache(maxsize=codec.KNOWN_HEADERS)
def same_of(number: int, block: int) -> bytes:
    """All of a block that a pull need not get again."""
    return codec.encode_block({"id": number, "block": block, "same": True}, 0)

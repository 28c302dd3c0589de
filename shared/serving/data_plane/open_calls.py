"""Calls that are open on a stream of a parameter server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from shared.blocks.buffers import Buffer
from shared.serving.core.calls import OpenPull
from shared.serving.core.pushes import OpenPush


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

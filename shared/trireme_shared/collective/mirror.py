"""A copy of the keys below one prefix of etcd, kept current by a watch; waiting for what it shows.

etcd --watch--> Mirror.values --change--> every `until` looks again
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import TypeVar

from trireme_shared.platform.etcd import Etcd, KeyValue, WatchBatch

T = TypeVar("T")


class Mirror:
    """`values`: the keys below `prefix` as etcd had them at `revision`, a moment ago. `known`: the first snapshot is there."""

    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self.prefix = prefix
        self.values: dict[str, KeyValue] = {}
        self.revision = 0
        self.known = asyncio.Event()
        self._etcd = etcd
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Mirror of {self.prefix}: {len(self.values)} keys at revision {self.revision}>"

    async def follow(self) -> None:
        """Run it in a TaskGroup; it ends only by WentBack."""
        async with aclosing(self._etcd.watch(self.prefix, prefix=True)) as batches:
            async for batch in batches:
                self._take(batch)
                self.known.set()
                self.notify()

    def _take(self, batch: WatchBatch) -> None:
        self.revision = batch.revision
        if batch.reset:
            self.values = {kv.key: kv for kv in batch.kvs}
        for event in batch.events:
            if event.type == "put":
                self.values[event.kv.key] = event.kv
            else:
                self.values.pop(event.kv.key, None)

    def notify(self) -> None:
        """Something that waiters look at has changed."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def until(self, found: Callable[[], T | None], limit_s: float | None = None) -> T:
        """What `found` answers as soon as it is not None. Raises TimeoutError after `limit_s`."""
        async with asyncio.timeout(limit_s):
            while True:
                changed = self._changed  # before the look: no change may be missed
                if (answer := found()) is not None:
                    return answer
                await changed.wait()

    def below(self, prefix: str) -> list[KeyValue]:
        """In no particular order."""
        return [kv for key, kv in self.values.items() if key.startswith(prefix)]

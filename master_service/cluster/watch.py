"""The pool as etcd has it: the registrations of places, kept current by one watch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import aclosing

from master_service.core.state.cluster import Place
from trireme_shared.platform.etcd import Etcd, KeyValue
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.protocol.keys import ClusterKeys
from trireme_shared.protocol.records.cluster import PoolMember


class PoolWatch:
    """`on_change(place, member)` for each change; None: its registration is gone."""

    def __init__(self, etcd: Etcd, keys: ClusterKeys, on_change: Callable[[Place, PoolMember | None], None]) -> None:
        self._etcd, self._keys, self._on_change = etcd, keys, on_change
        self._known: set[Place] = set()

    def start(self, found: Iterable[KeyValue]) -> None:
        """Begin with a first reading of all keys."""
        for kv in found:
            self._take(kv.key, kv.value)

    async def run(self, start_revision: int) -> None:
        """Until cancelled."""
        pool = self._keys.pool
        async with aclosing(self._etcd.watch(pool, prefix=True, start_revision=start_revision)) as batches:
            async for batch in batches:
                if batch.reset:
                    gone = self._known - {place for kv in batch.kvs if (place := self._place(kv.key))}
                    for place in gone:
                        self._known.discard(place)
                        self._on_change(place, None)
                    self.start(batch.kvs)
                    continue
                for event in batch.events:
                    self._take(event.kv.key, event.kv.value if event.type == "put" else None)

    def _place(self, key: str) -> Place | None:
        found = self._keys.member_of(key) if key.startswith(self._keys.pool) else None
        if found is None or found[2]:
            return None  # assignments are the leader's own writes
        kind, member, _ = found
        return (kind, member) if kind in ("trainer", "pserver") else None  # type: ignore[return-value]

    def _take(self, key: str, value: bytes | None) -> None:
        place = self._place(key)
        if place is None:
            return
        member = read_record(PoolMember, key, value)
        (self._known.discard if member is None else self._known.add)(place)
        self._on_change(place, member)

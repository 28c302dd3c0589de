"""The members as etcd has them: watches of trainers, of pservers and initialisation, and of checkpoints, as one `Members` value."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from typing import TypeVar

from master_service.core.state.members import Members
from shared.etcd import Etcd, KeyValue, WatchBatch
from shared.etcd.reading import read_record
from shared.keys import Keys
from shared.records import PserverMember, Record, TrainerMember
from shared.records.checkpoints import CheckpointLatest, OwnCheckpoints

R = TypeVar("R", bound=Record)


class MembersWatch:
    """`on_change(members)` is called after each change, never with an older value than before."""

    def __init__(self, etcd: Etcd, keys: Keys, on_change: Callable[[Members], None]) -> None:
        self._etcd, self._keys, self._on_change = etcd, keys, on_change
        self._kvs: dict[str, KeyValue] = {}
        self._ranges = (
            (keys.trainers, keys.trainers[:-1] + "0"),
            keys.directory(),
            (keys.latest, keys.latest + "\0"),
            (keys.own_prefix, keys.own_prefix[:-1] + "0"),
        )

    def start(self, found: Iterable[KeyValue]) -> Members:
        """Start from a first reading."""
        self._kvs = {kv.key: kv for kv in found if self._is_watched(kv.key)}
        return self.members()

    async def run(self, start_revision: int) -> None:
        """Watch all ranges from `start_revision` on, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for first, end in self._ranges:
                group.create_task(self._watch(first, end, start_revision))

    def members(self) -> Members:
        keys = self._keys
        trainers = self._read(TrainerMember, keys.trainers)
        pservers = self._read(PserverMember, keys.pservers)
        layout, latest = self._kvs.get(keys.layout), self._kvs.get(keys.latest)
        return Members(
            trainers={m.trainer: m for _, m in sorted(trainers, key=lambda found: found[0])},
            pservers={m.index: m for _, m in pservers},
            pserver_revisions={m.index: revision for revision, m in pservers},
            layout_revision=layout.create_revision if layout else 0,
            init_done=keys.init_done in self._kvs,
            latest=read_record(CheckpointLatest, latest.key, latest.value) if latest else None,
            latest_revision=latest.mod_revision if latest else 0,
            own={each.pserver: each for _, each in self._read(OwnCheckpoints, keys.own_prefix)},
        )

    def _read(self, kind: type[R], prefix: str) -> list[tuple[int, R]]:
        """(create_revision, record) of the keys with that prefix."""
        found = [(kv, read_record(kind, key, kv.value)) for key, kv in self._kvs.items() if key.startswith(prefix)]
        return [(kv.create_revision, record) for kv, record in found if record is not None]

    async def _watch(self, first: str, end: str, start_revision: int) -> None:
        async with aclosing(self._etcd.watch(first, end, start_revision=start_revision)) as batches:
            async for batch in batches:
                if self.take(batch, first, end):
                    self._on_change(self.members())

    def take(self, batch: WatchBatch, first: str, end: str) -> bool:
        """Take a batch of the watch of [first, end). Answers whether a watched key changed."""
        before = dict(self._kvs)
        if batch.reset:
            self._kvs = {key: kv for key, kv in self._kvs.items() if not first <= key < end}
            self._kvs.update((kv.key, kv) for kv in batch.kvs if self._is_watched(kv.key))
        for event in batch.events:
            if not self._is_watched(event.kv.key):
                continue
            if event.type == "put":
                self._kvs[event.kv.key] = event.kv
            else:
                self._kvs.pop(event.kv.key, None)
        return self._kvs != before

    def _is_watched(self, key: str) -> bool:
        keys = self._keys
        others = key in (keys.layout, keys.init_done, keys.latest)
        return keys.is_trainer(key) or others or key.startswith((keys.pservers, keys.own_prefix))

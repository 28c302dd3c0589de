"""The members as etcd has them: watches of trainers, of pservers and initialisation, and of checkpoints, as one `Members` value."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from master_service.core.state.job import LEFT_KEPT, Members
from trireme_shared.platform.etcd import Etcd, KeyValue, WatchBatch
from trireme_shared.platform.etcd.reading import read_number, read_record
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import PserverMember, TrainerMember
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, OwnCheckpoints
from trireme_shared.protocol.records.layout import Layout

K = TypeVar("K")
V = TypeVar("V")


class MembersWatch:
    """`on_change(members)` is called after each change, never with an older value than before."""

    def __init__(self, etcd: Etcd, keys: Keys, on_change: Callable[[Members], None]) -> None:
        self._etcd, self._keys, self._on_change = etcd, keys, on_change
        self._kvs: dict[str, KeyValue] = {}
        self._members = Members()
        self._ranges = (
            (keys.trainers, keys.trainers[:-1] + "0"),
            keys.directory(),
            (keys.latest, keys.latest + "\0"),
            (keys.own_prefix, keys.own_prefix[:-1] + "0"),
        )

    def start(self, found: Iterable[KeyValue]) -> Members:
        """Start from a first reading."""
        self._read_again({kv.key: kv for kv in found if self._is_watched(kv.key)})
        return self._members

    async def run(self, start_revision: int) -> None:
        """Watch all ranges from `start_revision` on, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for first, end in self._ranges:
                group.create_task(self._watch(first, end, start_revision))

    def members(self) -> Members:
        return self._members

    async def _watch(self, first: str, end: str, start_revision: int) -> None:
        async with aclosing(self._etcd.watch(first, end, start_revision=start_revision)) as batches:
            async for batch in batches:
                if self.take(batch, first, end):
                    self._on_change(self._members)

    def take(self, batch: WatchBatch, first: str, end: str) -> bool:
        """Take a batch of the watch of [first, end). Answers whether a watched key changed."""
        before = self._kvs
        if batch.reset:
            others = {key: kv for key, kv in before.items() if not first <= key < end}
            self._read_again(others | {kv.key: kv for kv in batch.kvs if self._is_watched(kv.key)})
            return self._kvs != before
        changed = False
        for event in batch.events:
            kv = event.kv if event.type == "put" else None
            if self._is_watched(event.kv.key) and before.get(event.kv.key) != kv:
                self._set(event.kv.key, kv)
                changed = True
        return changed

    def _read_again(self, kvs: dict[str, KeyValue]) -> None:
        self._kvs, self._members = {}, Members(left=self._members.left)
        for key, kv in sorted(kvs.items(), key=lambda item: item[1].create_revision):
            self._set(key, kv)

    def _set(self, key: str, kv: KeyValue | None) -> None:
        """In place: one key has this value now, None: it is gone. Only its own value is read, however many members there are."""
        keys, before, value = self._keys, self._members, kv.value if kv else None
        if kv is None:
            self._kvs.pop(key, None)
        else:
            self._kvs[key] = kv
        update: dict[str, object]
        if key.startswith(keys.pservers):
            pserver, index = read_record(PserverMember, key, value), read_number(key, keys.name_of(key).encode())
            revision = kv.create_revision if kv and pserver else None
            update = {
                "pservers": _with(before.pservers, index, pserver),
                "pserver_revisions": _with(before.pserver_revisions, index, revision),
            }
            if kv is None and index is not None:
                update["left"] = _left(before.left, f"pserver-{index}", before.pservers.get(index))
        elif key.startswith(keys.own_prefix):
            own = read_record(OwnCheckpoints, key, value)
            update = {"own": _with(before.own, read_number(key, keys.name_of(key).encode()), own)}
        elif key == keys.latest:
            update = {"latest": read_record(CheckpointLatest, key, value)}
            update["latest_revision"] = kv.mod_revision if kv else 0
        elif key == keys.layout:
            update = {
                "layout_revision": kv.create_revision if kv else 0,
                "layout": read_record(Layout, key, value),
            }
        elif key == keys.init_done:
            update = {"init_done": kv is not None, "initialiser": kv.value.decode(errors="replace") if kv else ""}
        else:
            trainer = read_record(TrainerMember, key, value)
            name = keys.name_of(key)
            update = {"trainers": _with(before.trainers, name, trainer)}
            if kv is None:
                update["left"] = _left(before.left, name, before.trainers.get(name))
        self._members = replace(before, **update)  # type: ignore[arg-type]

    def _is_watched(self, key: str) -> bool:
        keys = self._keys
        others = key in (keys.layout, keys.init_done, keys.latest)
        return keys.is_trainer(key) or others or key.startswith((keys.pservers, keys.own_prefix))


def _left(before: tuple[str, ...], name: str, last: TrainerMember | PserverMember | None) -> tuple[str, ...]:
    """Who left as asked, after the key of `name` has vanished. `last`: what it said last."""
    others = tuple(each for each in before if each != name) if name in before else before
    return (*others, name)[-LEFT_KEPT:] if last is not None and last.leaving else others


def _with(before: Mapping[K, V], key: K | None, value: V | None) -> dict[K, V]:
    """A copy; what is new comes last. A `value` of None is left out; a `key` that cannot be read is ignored."""
    found = dict(before)
    if key is not None and value is None:
        found.pop(key, None)
    elif key is not None and value is not None:
        found[key] = value
    return found

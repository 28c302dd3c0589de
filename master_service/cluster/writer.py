"""The only writer of a cluster's own keys: decide -> compare-and-set -> answer. One write at a time.

Each write compares the cluster's lock (its create_revision is the term) and `cluster/commit`, where the write before has left its
name. So writes form a chain: a late attempt of an earlier one, or of an earlier leader, is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from master_service.core.changes import DropAnswer, DropEvents, Event, PutEvents
from master_service.core.state.cluster import (
    ClusterChange,
    ClusterDecision,
    ClusterState,
    DropAssignment,
    DropDrain,
    DropJob,
    DropSchedule,
    DropSource,
    PutAssignment,
    PutDrain,
    PutJob,
    PutSchedule,
    PutSource,
    PutTaskRun,
)
from master_service.store.writer import MAX_TOLD, HeldLock, LockLost
from trireme_shared.platform.etcd import Compare, Delete, Etcd, Get, Put, TxnResult
from trireme_shared.platform.etcd.fenced import FencedWrite
from trireme_shared.platform.runtime import clock, ids
from trireme_shared.protocol.errors import TooLarge
from trireme_shared.protocol.keys import ClusterKeys
from trireme_shared.protocol.records.operations import KeptAnswer

MAX_CHANGES = 90  # of one transaction
MAX_BYTES = 900 << 10  # the client takes 1 MiB, keys included
MAX_EVENT_BYTES = 64 << 10
PAUSE_S = 0.1

A = TypeVar("A")


class ClusterWriter:
    """`state` may be read at any time. `commit_revision`: of `cluster/commit` as this term found it."""

    def __init__(
        self,
        etcd: Etcd,
        keys: ClusterKeys,
        state: ClusterState,
        lock: HeldLock,
        *,
        commit_revision: int,
        on_events: Callable[[Sequence[Event]], None],
    ) -> None:
        self.state = state
        self._etcd, self._keys, self._lock = etcd, keys, lock
        self._commit_revision, self._on_events = commit_revision, on_events
        self._turn = asyncio.Lock()
        self._told: list[tuple[str, Event]] = []
        self._over = False

    async def decide(self, decision: Callable[[ClusterState, float], ClusterDecision[A]]) -> A:
        """The decision's answer, once its changes are in etcd. Raises what the decision raises; LockLost when the term is over (the
        outcome is then unknown)."""
        async with self._turn:
            self._check()
            now = clock.monotonic()
            decided = decision(self.state, now)
            stamp = clock.timestamp()
            told = [*((stamp, event) for event in decided.events), *self._told]
            if told or decided.changes:
                taken, telling = self._telling(told)
                await self._write(decided.changes, telling)
                self._told = told[taken:]
                for change in (*decided.changes, *telling):
                    self.state.apply(change, now)
                self._on_events(decided.events)
            return decided.answer

    def _telling(self, told: Sequence[tuple[str, Event]]) -> tuple[int, tuple[PutEvents | DropEvents, ...]]:
        """How many of these events one transaction takes beside its changes, and what writes them."""
        taken = len(told)
        while taken:
            changes = self.state.events.told(told[:taken])
            if len(changes[0].value) <= MAX_EVENT_BYTES:
                return taken, changes
            taken //= 2
        return 0, ()

    def tell(self, events: Sequence[Event]) -> None:
        """Write events that no decision tells, with the next one. They are lost with the term, or if MAX_TOLD wait."""
        stamp = clock.timestamp()
        self._told += [(stamp, event) for event in events][: MAX_TOLD - len(self._told)]

    def end(self) -> None:
        """The term is over: nothing is decided any more."""
        self._over = True

    async def _write(self, changes: Sequence[ClusterChange], telling: Sequence[ClusterChange]) -> None:
        writes = list(operations(self._keys, changes))
        size = sum(len(write.value) for write in writes if isinstance(write, Put))
        if len(writes) > MAX_CHANGES or size > MAX_BYTES:
            msg = f"{len(writes)} changes with {size} bytes do not fit into one transaction ({MAX_CHANGES}, {MAX_BYTES} bytes)"
            raise TooLarge(msg)
        lock, commit, name = self._lock, self._keys.commit, ids.new_id("cluster").encode()

        async def landed(found: TxnResult) -> int:
            holder, marker = found.range(0).first, found.range(1).first
            if holder is None or holder.create_revision != lock.term or marker is None or marker.value != name:
                raise LockLost(f"the cluster's lock of term {lock.term} is lost: {commit} has another holder's write")
            return marker.mod_revision

        write = FencedWrite(
            self._etcd,
            fence_of(lock, self._keys, self._commit_revision),
            [*writes, *operations(self._keys, telling), Put(commit, name)],
            [Get(lock.key), Get(commit)],
            landed,
        )
        outcome = await write.until_answered(self._check, PAUSE_S)
        assert isinstance(outcome, int), "what did not land has raised"
        self._commit_revision = outcome

    def _check(self) -> None:
        if self._over or not self._lock.lease.alive:
            raise LockLost("this master leads the cluster no more; ask its successor")


def fence_of(lock: HeldLock, keys: ClusterKeys, commit_revision: int) -> list[Compare]:
    """The term is this one, and nothing was written since."""
    return [lock.compare(), Compare.mod(keys.commit, "==", commit_revision)]


def operations(keys: ClusterKeys, changes: Iterable[ClusterChange]) -> Iterable[Put | Delete]:
    """The last change of a key wins: a transaction may write a key once."""
    by_key: dict[str, Put | Delete] = {}
    for change in changes:
        match change:
            case PutJob(job):
                by_key[keys.job(job.job)] = Put(keys.job(job.job), job.to_bytes())
            case DropJob(name):
                job_keys = keys.keys_of(name)
                by_key[keys.job(name)] = Delete(keys.job(name))
                for prefix in (job_keys.prefix, keys.below_job(name)):
                    by_key[prefix] = Delete(prefix, prefix=True)
            case PutTaskRun(run):
                by_key[keys.task_run(run.job, run.name)] = Put(keys.task_run(run.job, run.name), run.to_bytes())
            case PutAssignment(place, assignment):
                key = keys.assignment(*place)
                by_key[key] = Put(key, assignment.to_bytes())
            case DropAssignment(place):
                by_key[keys.assignment(*place)] = Delete(keys.assignment(*place))
            case PutDrain(place, drain):
                by_key[keys.drain(*place)] = Put(keys.drain(*place), drain.to_bytes())
            case DropDrain(place):
                by_key[keys.drain(*place)] = Delete(keys.drain(*place))
            case PutEvents(first, _, value):
                by_key[keys.event_chunk(first)] = Put(keys.event_chunk(first), value)
            case DropEvents(before):
                by_key[keys.events] = Delete(keys.events, keys.event_chunk(before))
            case PutSource(digest, source):
                by_key[keys.source(digest)] = Put(keys.source(digest), source.to_bytes())
            case DropSource(digest):
                by_key[keys.source(digest)] = Delete(keys.source(digest))
            case PutSchedule(schedule):
                by_key[keys.schedule(schedule.name)] = Put(keys.schedule(schedule.name), schedule.to_bytes())
            case KeptAnswer():
                by_key[keys.answer(change.key)] = Put(keys.answer(change.key), change.to_bytes())
            case DropAnswer(key):
                by_key[keys.answer(key)] = Delete(keys.answer(key))
            case DropSchedule(name):
                by_key[keys.schedule(name)] = Delete(keys.schedule(name))
    return by_key.values()

"""A new leader takes the cluster over: its address is written under the lock, then every job, schedule, assignment and place is read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from master_service.cluster.writer import Overtaken, write_under
from master_service.core.state.cluster import ClusterState, Place, PutAssignment, PutJob, PutSchedule
from master_service.store.writer import HeldLock, LockLost
from shared.errors import PeerError
from shared.etcd import Etcd, KeyValue, Put
from shared.etcd.reading import must_read, read_below
from shared.keys import ClusterKeys
from shared.records import MasterAddress
from shared.records.cluster import Assignment, ClusterJob, JobSchedule
from shared.runtime import clock, ids, telemetry

PAUSE_S = 0.1

log = telemetry.logger("cluster.takeover")


@dataclass(frozen=True, slots=True)
class ClusterTakeover:
    """What a new leader starts from. `pool`: the keys of the pool at `revision`; its watch continues from the next one."""

    commit_revision: int
    revision: int
    state: ClusterState
    pool: tuple[KeyValue, ...]


async def take_over(etcd: Etcd, keys: ClusterKeys, lock: HeldLock, url: str) -> ClusterTakeover:
    """Raises LockLost, StateUnreadable, PeerError."""

    def check() -> None:
        if not lock.lease.alive:
            raise LockLost(f"{lock.key} of term {lock.term} was lost during the takeover")

    address = Put(keys.address, MasterAddress(url=url, term=lock.term).to_bytes(), lock.lease.id)
    while True:
        try:
            before = await _commit_revision(etcd, keys, check)
            commit_revision = await write_under(etcd, keys, lock, before, [address], check)
            break
        except Overtaken as error:  # the last write of the leader before has arrived in between
            log.info("takeover_repeated", cause=error.message)
    jobs, _ = await read_below(etcd, keys.jobs)
    schedules, _ = await read_below(etcd, keys.schedules)
    pool, revision = await read_below(etcd, keys.pool)
    state, now = ClusterState(), clock.monotonic()
    for kv in jobs.values():
        state.apply(PutJob(must_read(ClusterJob, kv.key, kv.value)), now)
    for kv in schedules.values():
        state.apply(PutSchedule(must_read(JobSchedule, kv.key, kv.value)), now)
    for kv in pool.values():
        found = keys.member_of(kv.key)
        if found is not None and found[2]:
            kind, member, _ = found
            place: Place = (kind, member)  # type: ignore[assignment]
            state.apply(PutAssignment(place, must_read(Assignment, kv.key, kv.value)), now)
    log.info("took_over", term=lock.term, state=repr(state))
    return ClusterTakeover(commit_revision, revision, state, tuple(pool.values()))


async def _commit_revision(etcd: Etcd, keys: ClusterKeys, check: Callable[[], None]) -> int:
    """Of `cluster/commit`, 0 if it does not exist. Repeated until etcd answers; `check` raises when it is too late."""
    while True:
        check()
        try:
            marker = await etcd.get(keys.commit)
        except PeerError as error:
            log.warning("takeover_unanswered", cause=str(error))
            await asyncio.sleep(ids.jitter(PAUSE_S))
        else:
            return marker.mod_revision if marker else 0

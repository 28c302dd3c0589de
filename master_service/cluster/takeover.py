"""A new leader takes the cluster over: its address is written under the lock, then every job, schedule, assignment and place is read."""

from __future__ import annotations

from dataclasses import dataclass

from master_service.core.state.cluster import (
    ClusterState,
    Place,
    PutAssignment,
    PutDrain,
    PutJob,
    PutSchedule,
    PutTaskRun,
)
from master_service.store.first_write import write_first
from master_service.store.schema import read_events
from master_service.store.writer import HeldLock
from trireme_shared.platform.etcd import Etcd, KeyValue, Put
from trireme_shared.platform.etcd.reading import must_read, read_below
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.keys import ClusterKeys
from trireme_shared.protocol.records import MasterAddress
from trireme_shared.protocol.records.cluster import Assignment, ClusterJob, Drain, JobSchedule, TaskRun
from trireme_shared.protocol.records.operations import KeptAnswer

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
    address = Put(keys.address, MasterAddress(url=url, term=lock.term).to_bytes(), lock.lease.id)
    commit_revision = await write_first(etcd, lock, keys.commit, [address])
    jobs, _ = await read_below(etcd, keys.jobs)
    schedules, _ = await read_below(etcd, keys.schedules)
    answers, _ = await read_below(etcd, keys.answers)
    pool, revision = await read_below(etcd, keys.pool)
    state, now = ClusterState(events=await read_events(etcd, keys.events)), clock.monotonic()
    state.events.begin(commit_revision)
    for kv in jobs.values():
        if keys.is_job(kv.key):
            state.apply(PutJob(must_read(ClusterJob, kv.key, kv.value)), now)
        else:
            state.apply(PutTaskRun(must_read(TaskRun, kv.key, kv.value)), now)
    for kv in schedules.values():
        state.apply(PutSchedule(must_read(JobSchedule, kv.key, kv.value)), now)
    for kv in answers.values():
        state.apply(must_read(KeptAnswer, kv.key, kv.value), now)
    for kv in pool.values():
        found = keys.member_of(kv.key)
        if found is not None and found[2]:
            kind, member, _ = found
            place: Place = (kind, member)  # type: ignore[assignment]
            state.apply(PutAssignment(place, must_read(Assignment, kv.key, kv.value)), now)
        if (drained := keys.drained_in(kv.key)) is not None:
            state.apply(PutDrain(drained, must_read(Drain, kv.key, kv.value)), now)  # type: ignore[arg-type]
    log.info("took_over", term=lock.term, state=repr(state))
    return ClusterTakeover(commit_revision, revision, state, tuple(pool.values()))

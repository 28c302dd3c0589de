"""A cluster's own keys in etcd: a new leader reads them all, one writer changes them, and a watch follows the
pool's members.

take_over       the address is written under the lock; then every job, schedule, assignment and place is read
ClusterWriter   decide -> compare-and-set -> answer. One write at a time
RestingEvents   the events of jobs that nobody leads, read once for all who look at them
PoolWatch       the registrations of places, which host agents write

Each write compares the cluster's lock (its create_revision is the term) and `cluster/commit`, where the write
before has left its name. So writes form a chain: a late attempt of an earlier one, or of an earlier leader,
is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from master_service.cluster.unreadable import unreadable_job, unreadable_schedule
from master_service.core.changes import DropAnswer, DropEvents, Event, PutEvents
from master_service.core.state.cluster import (
    ClusterChange,
    ClusterDecision,
    ClusterState,
    DropAssignment,
    DropDrain,
    DropJob,
    DropJobOperation,
    DropSchedule,
    DropSource,
    Place,
    PutAssignment,
    PutDrain,
    PutJob,
    PutJobOperation,
    PutSchedule,
    PutSource,
    PutTaskRun,
)
from master_service.core.state.kept import EventLog
from master_service.store.schema import read_events
from master_service.store.writer import MAX_TOLD, HeldLock, LockLost, write_first
from trireme_shared.platform.etcd import Compare, Delete, Etcd, Get, KeyValue, Put, TxnResult
from trireme_shared.platform.etcd.fenced import FencedWrite
from trireme_shared.platform.etcd.reading import must_read, read_below, read_record, schema_to_write
from trireme_shared.platform.membership.names import deletion_of_job
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.protocol.errors import StateUnreadable, TooLarge
from trireme_shared.protocol.keys import ClusterKeys
from trireme_shared.protocol.records import MasterAddress
from trireme_shared.protocol.records.cluster import (
    Assignment,
    ClusterJob,
    Drain,
    JobSchedule,
    PoolMember,
    Standing,
    TaskRun,
)
from trireme_shared.protocol.records.operations import KeptAnswer, Operation

MAX_CHANGES = 90  # of one transaction
MAX_BYTES = 900 << 10  # the client takes 1 MiB, keys included
MAX_EVENT_BYTES = 64 << 10
LAST_BYTES = 950 << 10  # of a write that ends what has become too large for others
END_BYTES = 32 << 10  # that an end adds to a record: its reason, times
PAUSE_S = 0.1

A = TypeVar("A")

log = telemetry.logger("cluster.takeover")


@dataclass(frozen=True, slots=True)
class ClusterTakeover:
    """What a new leader starts from. `pool`: the keys of the pool at `revision`; its watch continues from the
    next one."""

    commit_revision: int
    revision: int
    state: ClusterState
    pool: tuple[KeyValue, ...]


async def take_over(etcd: Etcd, keys: ClusterKeys, lock: HeldLock, url: str) -> ClusterTakeover:
    """Jobs and schedules that this version cannot read are UNREADABLE in its state. Raises LockLost,
    PeerError; StateUnreadable if the cluster has a form that this version does not know."""
    address = Put(keys.address, MasterAddress(url=url, term=lock.term).to_bytes(), lock.lease.id)
    schema = schema_to_write(keys.schema, await etcd.get(keys.schema))
    commit_revision = await write_first(etcd, lock, keys.commit, [address, *schema])
    jobs, _ = await read_below(etcd, keys.jobs)
    schedules, _ = await read_below(etcd, keys.schedules)
    answers, _ = await read_below(etcd, keys.answers)
    asked, _ = await read_below(etcd, keys.operations)
    pool, revision = await read_below(etcd, keys.pool)
    state, now = ClusterState(events=await read_events(etcd, keys.events)), clock.monotonic()
    state.events.begin(commit_revision)
    for kv in jobs.values():
        _restore_job(state, keys, kv, now)
    for kv in schedules.values():
        _restore_schedule(state, keys, kv, now)
    for kv in answers.values():
        if (answer := read_record(KeptAnswer, kv.key, kv.value)) is not None:
            state.apply(answer, now)
    for kv in asked.values():
        name, _ = keys.operation_in(kv.key)
        if (operation := read_record(Operation, kv.key, kv.value)) is not None:
            state.apply(PutJobOperation(name, operation), now)
    for kv in pool.values():
        found = keys.member_of(kv.key)
        if found is not None and found[2]:
            kind, member, _ = found
            place: Place = (kind, member)  # type: ignore[assignment]
            # one that nobody can read is of no job, and is dropped
            held = read_record(Assignment, kv.key, kv.value) or Assignment(job="", epoch=0)
            state.apply(PutAssignment(place, held), now)
        if (drained := keys.drained_in(kv.key)) is not None:
            drain = read_record(Drain, kv.key, kv.value) or Drain()  # that the key is there says it
            state.apply(PutDrain(drained, drain), now)  # type: ignore[arg-type]
    log.info("took_over", term=lock.term, state=repr(state))
    return ClusterTakeover(commit_revision, revision, state, tuple(pool.values()))


def _restore_job(state: ClusterState, keys: ClusterKeys, kv: KeyValue, now: float) -> None:
    """In place. A job whose record, or the record of one of its tasks, cannot be read is set aside."""
    name, _, rest = kv.key.removeprefix(keys.jobs).partition("/")
    try:
        if not rest:
            _check_can_be_written(kv)
            state.apply(PutJob(must_read(ClusterJob, kv.key, kv.value)), now)
        elif rest.startswith("tasks/"):
            state.apply(PutTaskRun(must_read(TaskRun, kv.key, kv.value)), now)
    except StateUnreadable as error:
        log.warning("job_unreadable", job=name, cause=error.message)
        if not rest:
            state.jobs[name] = unreadable_job(name, kv.value, error.message)
        elif name in state.jobs:
            state.set_aside(name, error.message)


def _restore_schedule(state: ClusterState, keys: ClusterKeys, kv: KeyValue, now: float) -> None:
    """In place."""
    name = kv.key.removeprefix(keys.schedules)
    try:
        _check_can_be_written(kv)
        state.apply(PutSchedule(must_read(JobSchedule, kv.key, kv.value)), now)
    except StateUnreadable as error:
        log.warning("schedule_unreadable", schedule=name, cause=error.message)
        state.unreadable_schedules[name] = unreadable_schedule(name, kv.value, error.message)


def _check_can_be_written(kv: KeyValue) -> None:
    """Raises StateUnreadable: the record is too large for the transaction that would change it."""
    most = LAST_BYTES - END_BYTES
    if len(kv.value) > most:
        msg = f"{kv.key} has {len(kv.value)} bytes, and one that is changed has at most {most}"
        raise StateUnreadable(msg, key=kv.key)


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
        self._writing: asyncio.Future[None] | None = None
        self._told: list[tuple[str, Event]] = []
        self._over = False

    async def decide(
        self, decision: Callable[[ClusterState, float], ClusterDecision[A]], most_bytes: int = MAX_BYTES
    ) -> A:
        """The decision's answer, once its changes are in etcd. What was decided is written, also if the
        caller is cancelled meanwhile: the next write depends on it. Raises what the decision raises; TooLarge
        if no transaction of `most_bytes` takes its changes (its `details` name the largest one's job or
        schedule); LockLost when the term is over (the outcome is then unknown)."""
        async with self._turn:
            if self._writing is not None:  # its caller has gone
                await asyncio.wait([self._writing])
            self._check()
            now = clock.monotonic()
            decided = decision(self.state, now)
            stamp = clock.timestamp()
            waiting = len(self._told)
            told = [*((stamp, event) for event in decided.events), *self._told]
            if told or decided.changes:
                self._writing = asyncio.ensure_future(self._commit(decided, told, waiting, most_bytes))
                self._writing.add_done_callback(_note_written)
                await asyncio.shield(self._writing)
                self._writing = None
            return decided.answer

    async def _commit(
        self, decided: ClusterDecision[Any], told: Sequence[tuple[str, Event]], waiting: int, most_bytes: int
    ) -> None:
        """`told`: the last `waiting` of them are what no decision tells."""
        now, (taken, telling) = clock.monotonic(), self._telling(told)
        await self._write(decided.changes, telling, most_bytes)
        self._told = [*told[taken:], *self._told[waiting:]]  # some may have come meanwhile
        for change in (*decided.changes, *telling):
            self.state.apply(change, now)
        self._on_events(decided.events)

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
        """Write events that no decision tells, with the next one. They are lost with the term, or if MAX_TOLD
        wait."""
        stamp = clock.timestamp()
        self._told += [(stamp, event) for event in events][: MAX_TOLD - len(self._told)]

    def end(self) -> None:
        """The term is over: nothing is decided any more."""
        self._over = True

    async def _write(
        self, changes: Sequence[ClusterChange], telling: Sequence[ClusterChange], most_bytes: int
    ) -> None:
        writes = list(operations(self._keys, changes))
        size = sum(len(write.value) for write in writes if isinstance(write, Put))
        if len(writes) > MAX_CHANGES or size > most_bytes:
            msg = (
                f"{len(writes)} changes with {size} bytes do not fit into one transaction "
                f"({MAX_CHANGES}, {most_bytes} bytes)"
            )
            raise TooLarge(msg, **_largest(changes))
        lock, commit, name = self._lock, self._keys.commit, ids.new_id("cluster").encode()

        async def landed(found: TxnResult) -> int:
            holder, marker = found.range(0).first, found.range(1).first
            if (
                holder is None
                or holder.create_revision != lock.term
                or marker is None
                or marker.value != name
            ):
                raise LockLost(
                    f"the cluster's lock of term {lock.term} is lost: {commit} has another holder's write"
                )
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


def _note_written(writing: asyncio.Future[None]) -> None:
    """A caller that has gone does not read the error: then it would be reported as never retrieved."""
    if not writing.cancelled() and (error := writing.exception()) is not None:
        log.debug("not_written", cause=str(error))


def _largest(changes: Iterable[ClusterChange]) -> dict[str, str]:
    """The job or the schedule that makes the changes too large."""
    sizes: dict[tuple[str, str], int] = {}
    for change in changes:
        match change:
            case PutJob(job):
                sizes["job", job.job] = len(job.to_bytes())
            case PutSchedule(schedule):
                sizes["schedule", schedule.name] = len(schedule.to_bytes())
    return dict([max(sizes, key=sizes.__getitem__)]) if sizes else {}


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
            case DropJob(name, has_keys):
                by_key[keys.job(name)] = Delete(keys.job(name))
                by_key[keys.below_job(name)] = Delete(keys.below_job(name), prefix=True)
                if has_keys:
                    by_key |= {each.key: each for each in deletion_of_job(keys.keys_of(name))}
            case PutTaskRun(run):
                by_key[keys.task_run(run.job, run.name)] = Put(
                    keys.task_run(run.job, run.name), run.to_bytes()
                )
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
            case PutJobOperation(name, operation):
                key = keys.operation(name, operation.operation_id)
                by_key[key] = Put(key, operation.to_bytes())
            case DropJobOperation(name, operation_id):
                key = keys.operation(name, operation_id)
                by_key[key] = Delete(key)
            case KeptAnswer():
                by_key[keys.answer(change.key)] = Put(keys.answer(change.key), change.to_bytes())
            case DropAnswer(key):
                by_key[keys.answer(key)] = Delete(keys.answer(key))
            case DropSchedule(name):
                by_key[keys.schedule(name)] = Delete(keys.schedule(name))
    return by_key.values()


MOST_RESTING = 64  # logs of at most 256 KiB that are kept
FRESH_S = 1.0  # of a job that may be led at any moment
RESTING_S = 10.0  # of any other: its log changes with its ClusterJob


@dataclass(eq=False, slots=True)
class _Read:
    """`job` None: nothing is read yet."""

    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    job: ClusterJob | None = None
    log: EventLog = field(default_factory=EventLog)
    at: float = 0.0

    def is_of(self, job: ClusterJob) -> bool:
        fresh_s = FRESH_S if job.standing is Standing.ACTIVE else RESTING_S
        return self.job is job and clock.monotonic() - self.at < fresh_s


class RestingEvents:
    """Of jobs that nobody leads: only a leader of a job writes its log. The logs that were asked for last are
    kept, so that any number of viewers costs one reading."""

    def __init__(self, etcd: Etcd, keys: ClusterKeys) -> None:
        self._etcd, self._keys = etcd, keys
        self._read: dict[str, _Read] = {}

    async def of(self, job: ClusterJob) -> EventLog:
        """To read. `job`: as the cluster has it now. Raises PeerError."""
        read = self._read.pop(job.job) if job.job in self._read else _Read()
        self._read[job.job] = read  # it was asked for last
        while len(self._read) > MOST_RESTING:
            del self._read[next(iter(self._read))]
        async with read.reading:
            if not read.is_of(job):
                read.log = await read_events(self._etcd, self._keys.keys_of(job.job).events)
                read.job, read.at = job, clock.monotonic()
            return read.log


class PoolWatch:
    """`on_change(place, member)` for each change; None: its registration is gone."""

    def __init__(
        self, etcd: Etcd, keys: ClusterKeys, on_change: Callable[[Place, PoolMember | None], None]
    ) -> None:
        self._etcd, self._keys, self._on_change = etcd, keys, on_change
        self._known: set[Place] = set()
        self._ran = False

    def start(self, found: Iterable[KeyValue]) -> None:
        """Begin with a first reading of all keys."""
        for kv in found:
            self._take(kv.key, kv.value)

    async def run(self, start_revision: int) -> None:
        """Until cancelled. Called again after an error it reads all keys anew."""
        pool, begin = self._keys.pool, 0 if self._ran else start_revision
        self._ran = True
        async with aclosing(self._etcd.watch(pool, prefix=True, start_revision=begin)) as batches:
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

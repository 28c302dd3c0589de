"""A new leader takes the job over: write under the lock -> read every key -> the job as etcd holds it.

lock held --> first write under it (a master's address) --> all keys read --> spec agreed --> dataset loaded or counted --> Job

The first writes of a term land once each, right after the last write of the term before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from master_service.core.changes import Event
from master_service.core.decisions.lifecycle import fail
from master_service.core.queue.file_table import FileTable, TaskSizes
from master_service.core.queue.streams import news_of
from master_service.core.state.job import Job
from master_service.storage.job_storage import JobStorage
from master_service.store import schema
from master_service.store.writer import HeldLock, LockLost
from trireme_shared.checkpoints.stored import ELASTIC
from trireme_shared.platform.etcd import Compare, Etcd, Get, KeyValue, Put, TxnResult
from trireme_shared.platform.etcd.fenced import FencedWrite
from trireme_shared.platform.etcd.reading import must_read, read_below
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.protocol.errors import (
    Conflict,
    DatasetError,
    NotFound,
    PeerError,
    ResourceExhausted,
    StorageUnreachable,
)
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import FailureCause, JobSpec, JobState, TaskMeta, UserFailure
from trireme_shared.protocol.records.assignments import GivenNumbers
from trireme_shared.protocol.records.datasets import Dataset

PAUSE_S = 0.1

log = telemetry.logger("takeover")


@dataclass(frozen=True, slots=True)
class Takeover:
    """What a new leader starts from. `revision`: of the reading; watches continue from the next one. `news`: of a job that it has opened."""

    commit_revision: int
    revision: int
    found: dict[str, KeyValue]
    job: Job
    news: tuple[Event, ...] = ()


async def take_over(
    etcd: Etcd, keys: Keys, lock: HeldLock, spec: JobSpec | None, storage: Callable[[JobSpec], JobStorage], *first: Put
) -> Takeover:
    """Write `first` under the lock (a master's address), read every key, restore the job.

    Raises LockLost; NotFound without a spec; StateUnreadable; Conflict if `spec` is not the job's or the dataset has changed.
    StorageUnreachable: nothing is decided, and the next candidate tries again, perhaps with a better way to the storage.
    If the dataset cannot be read the job fails, and its state tells the user why; that is not raised.
    """
    commit_revision = await write_first(etcd, lock, keys.commit, first)
    found, revision = await read_below(etcd, keys.prefix)
    spec = _agreed_spec(keys, found, spec)
    stored = found.get(keys.spec)
    if stored is None or must_read(JobSpec, stored.key, stored.value) != spec:
        numbers = GivenNumbers(trainers=spec.trainers, pservers=spec.pservers)
        writes = [Put(keys.spec, spec.to_bytes()), Put(keys.pservers_desired, str(spec.pservers).encode())]
        if stored is not None:
            writes.append(Put(keys.given, numbers.to_bytes()))
        if stored is None:
            writes.append(Put(keys.state, JobState(reason="counting the dataset's records").to_bytes()))
        commit_revision = await write_first(etcd, lock, keys.commit, writes)
        found, revision = await read_below(etcd, keys.prefix)
    news: tuple[Event, ...] = ()
    job, unreadable = await _open_job(found.get(keys.task_meta), spec, storage(spec))
    if unreadable is None:
        schema.restore(job, keys, found, clock.monotonic())
        opening = [] if keys.task_meta in found else [Put(keys.task_meta, job.meta.to_bytes())]
        table, plan = job.training.streams.table, job.plan
        if (stored := found.get(keys.plan)) is None or stored.value != plan.to_bytes():
            opening.append(Put(keys.plan, plan.to_bytes()))
            news = tuple(news_of(spec, table, plan)) if table is not None else ()
    else:
        schema.restore_events(job, keys, found)
        job.state = must_read(JobState, keys.state, found[keys.state].value)
        where = "counting the dataset's records"
        failure = UserFailure(error_type=type(unreadable).__name__, message=unreadable.message, task=where)
        for change in fail(job.state, unreadable.message, FailureCause.DATASET, failure).changes:
            job.apply(change, clock.monotonic())
        opening = [Put(keys.state, job.state.to_bytes())]
    if opening:
        commit_revision = await write_first(etcd, lock, keys.commit, opening)
    job.events.begin(commit_revision)
    log.info("took_over", lock=lock.key, term=lock.term, job=repr(job))
    return Takeover(commit_revision, revision, found, job, news)


def _agreed_spec(keys: Keys, found: dict[str, KeyValue], given: JobSpec | None) -> JobSpec:
    """The spec in etcd. `given` may differ in the numbers of members and in the digests of the script, in nothing else. Raises NotFound, Conflict."""
    stored = found.get(keys.spec)
    if stored is None:
        if given is None:
            msg = f"job {keys.job} has no spec in etcd yet; start its first master with TRIREME_SPEC"
            raise NotFound(msg)
        return given
    spec = must_read(JobSpec, stored.key, stored.value)
    if given is None:
        return spec
    differing = [
        name for name in JobSpec.model_fields if name not in ELASTIC and getattr(given, name) != getattr(spec, name)
    ]
    if differing:
        name = differing[0]
        msg = (
            f"job {keys.job} exists with another spec: {name} is {getattr(spec, name)!r} there and "
            f"{getattr(given, name)!r} here; use another job name, or the same values"
        )
        raise Conflict(msg, differing=differing)
    numbers = found.get(keys.given)
    known = must_read(GivenNumbers, numbers.key, numbers.value) if numbers is not None else None
    if known is not None and (known.trainers, known.pservers) == (given.trainers, given.pservers):
        # the spec of before a resize: its numbers are not wanted anew
        return spec.with_fields(sources=given.sources)
    return given


async def _open_job(meta: KeyValue | None, spec: JobSpec, storage: JobStorage) -> tuple[Job, DatasetError | None]:
    """A job with nothing done. It has no tasks if the dataset cannot be read."""
    known = must_read(TaskMeta, meta.key, meta.value) if meta else None
    try:
        sizes = TaskSizes.of(spec, _task_records(spec, known, known.task_records if known else 0))
        table = await _table(storage, spec.dataset, sizes, known.digest if known else "")
        evaluation = None
        if spec.evaluation_dataset is not None:
            digest = known.evaluation_digest if known else ""
            sizes = TaskSizes.evaluated(spec, _task_records(spec, known, known.evaluation_task_records if known else 0))
            evaluation = await _table(storage, spec.evaluation_dataset, sizes, digest)
    except DatasetError as error:
        log.warning("dataset_unreadable", cause=error.message)
        return Job.open(spec, FileTable((), 1), None), error
    return Job.open(spec, table, evaluation, known), None


def _task_records(spec: JobSpec, known: TaskMeta | None, of_table: int) -> int:
    """Records of a task in a job that has begun; 0: it begins now. Earlier versions did not say it."""
    return (of_table or spec.records_per_task or 16 * spec.minibatch_size) if known is not None else 0


async def _table(storage: JobStorage, source: Dataset, sizes: TaskSizes, digest: str) -> FileTable:
    """`digest`: of a job that has begun; a table that is lost is counted again then. Raises DatasetError, StorageUnreachable."""
    if digest:
        try:
            return await storage.load_table(digest)
        except (NotFound, DatasetError) as error:
            log.warning("file_table_missing", digest=digest, cause=error.message)
    try:
        table = await storage.count(source, sizes)
    except (ResourceExhausted, StorageUnreachable) as error:
        if digest:
            raise StorageUnreachable(error.message, hint=error.hint) from error
        raise DatasetError(error.message, hint=error.hint) from error
    except DatasetError as error:
        cause = error.__cause__
        if digest and isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError | NotADirectoryError):
            raise StorageUnreachable(error.message, hint="make the dataset reachable; it is tried again") from error
        raise
    if not table.tasks:
        urls = ", ".join(source.urls)
        raise DatasetError(f"the dataset has no records: {urls}", hint="check the path or glob")
    return table


async def write_first(etcd: Etcd, lock: HeldLock, commit: str, writes: Sequence[Put]) -> int:
    """Write under the lock, exactly once; the revision. `commit`: the key where each write of the lock's holders leaves its name.
    Raises LockLost.

    An attempt without an answer may land long after the term has begun. So each attempt compares `commit` and writes it: of
    several attempts one lands, and none after a later write. The last write of the term before may come in between: then the
    next attempt compares what that one wrote.
    """
    name = ids.new_id("takeover").encode()
    reads = [Get(lock.key), Get(commit)]

    def check() -> None:
        if not lock.lease.alive:
            raise LockLost(f"{lock.key} of term {lock.term} was lost during the takeover")

    async def landed(found: TxnResult) -> int:
        holder, marker = found.range(0).first, found.range(1).first
        if holder is None or holder.create_revision != lock.term:
            raise LockLost(f"{lock.key} of term {lock.term} was lost during the takeover")
        return marker.mod_revision if marker is not None and marker.value == name else 0

    found_at = await _revision_of(etcd, commit, check)
    while True:
        fence = [lock.compare(), Compare.mod(commit, "==", found_at)]
        write = FencedWrite(etcd, fence, [*writes, Put(commit, name)], reads, landed)
        outcome = await write.until_answered(check, PAUSE_S)
        if isinstance(outcome, int):
            return outcome
        marker = outcome.range(1).first
        found_at = marker.mod_revision if marker else 0


async def _revision_of(etcd: Etcd, commit: str, check: Callable[[], None]) -> int:
    """0 if the key does not exist. Repeated until etcd answers; `check` raises when it is too late."""
    while True:
        check()
        try:
            marker = await etcd.get(commit)
        except PeerError as error:
            log.warning("takeover_unanswered", cause=str(error))
            await asyncio.sleep(ids.jitter(PAUSE_S))
        else:
            return marker.mod_revision if marker else 0

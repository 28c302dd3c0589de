"""The master without REST: `Master` leads, or stands by until it may. What its methods promise holds across
masters.

run(): lease -> campaign -> take over -> Term ... lock or lease lost
    -> again, as a candidate with nothing in memory
methods: NotLeader on a standby (with the leader's url), NotReady while taking over, else the answer once etcd
    has it

A Term has the writer, the watch of the members and the supervisor. They all end with the lock.

A new leader takes the job over: write under the lock -> read every key -> the job as etcd holds it.

lock held --> first write under it (a master's address) --> all keys read --> spec agreed
    --> dataset loaded or counted --> Job
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from master_service.control.evictions import Evictions
from master_service.control.observation import Observer, StallWatch
from master_service.control.series_keeper import Origin, SeriesKeeper
from master_service.control.supervisor import Supervisor
from master_service.control.task_service import TaskService, WaitingAsks
from master_service.control.tracking import Tracking, result_of
from master_service.core.changes import Change, Event
from master_service.core.decisions.lifecycle import fail
from master_service.core.decisions.recovery import ref_of
from master_service.core.decisions.requests import Once
from master_service.core.decisions.tasks import current_metrics, freed_by
from master_service.core.queue.file_table import FileTable, TaskSizes
from master_service.core.queue.streams import news_of
from master_service.core.state.job import Job
from master_service.leadership.election import Candidate, Leads, stand
from master_service.storage.job_storage import JobStorage
from master_service.store import schema
from master_service.store.schema import MembersWatch
from master_service.store.writer import (
    TERM_OVER,
    HeldLock,
    LeaderWriter,
    MasterWriter,
    Writer,
    write_first,
)
from trireme_shared.checkpoints.stored import ELASTIC
from trireme_shared.platform.etcd import Etcd, KeyValue, Lease, LeaseLost, Put
from trireme_shared.platform.etcd.reading import must_read, read_below, read_record, schema_to_write
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.runtime.containment import Containment, LongLivedGroup
from trireme_shared.protocol.errors import (
    Conflict,
    DatasetError,
    NotFound,
    PeerError,
    ResourceExhausted,
    StorageUnreachable,
)
from trireme_shared.protocol.evaluations import Evaluation
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.metrics import LOSS
from trireme_shared.protocol.records import (
    AcquireTask,
    EpochPlan,
    FailureCause,
    JobSpec,
    JobState,
    MasterAddress,
    MetricBatch,
    MetricsTaken,
    Mode,
    Phase,
    TaskAnswer,
    TaskMeta,
    UserFailure,
)
from trireme_shared.protocol.records.assignments import GivenNumbers, SlotMap
from trireme_shared.protocol.records.datasets import Dataset
from trireme_shared.protocol.records.job_choices import name_problem
from trireme_shared.protocol.records.operations import Operation

log = telemetry.logger("master")


#: Changes that parts of the leader wait for, also those that no event tells of.
LOOKED_AT = (JobState, JobSpec, SlotMap, Operation)


class Term:
    """`job` may be read at any time; it changes only through `writer`."""

    def __init__(self, master: TaskService, lock: HeldLock, start: Takeover) -> None:
        self.number = lock.term
        self.lease = lock.lease
        self.job: Job = start.job
        self.asks = WaitingAsks()
        self._start, self._events = start, master.events
        self.writer = MasterWriter(
            master.etcd,
            master.keys,
            start.job,
            lock,
            commit_revision=start.commit_revision,
            on_events=self._on_events,
            on_changes=self._on_changes,
        )
        self.storage = master.storage(start.job.spec)
        spec = start.job.spec
        self.series = SeriesKeeper(
            self.storage.series,
            lock.term,
            skips=spec.on_nonfinite == "skip",
            origin=self._origin,
            push_every=spec.push_every if spec.mode is Mode.ASYNC else 1,
            leads=lambda: lock.lease.alive,
        )
        for number in sorted(self.job.evaluations):  # the master before may not have stored the last ones
            self.series.note_evaluation(self.job.evaluations[number])
        writer = LeaderWriter(master.etcd, master.keys, self.writer)
        self._supervisor = Supervisor(master, writer, lock, self.storage, self.asks.freed)
        self._watch = MembersWatch(master.etcd, master.keys, self._supervisor.take_members)
        self._tracking = Tracking(
            start.job.spec,
            permitted_s=lambda: lock.lease.remaining_s,
            result=self._result,
            tell=self._events.add,
            find_folder=self.storage.script_folder,
        )
        self.operations = self._supervisor.operations
        self.evictions = self._supervisor.evictions
        self.stall = StallWatch(master.etcd)
        self.observer = Observer(master.etcd, master.keys, self.stall)

    def _origin(self) -> Origin:
        state, latest = self.job.state, self.job.members.latest
        ref = ref_of(latest, state.checkpoint)
        kept = latest.kept if latest is not None else ()
        if ref is None:
            return Origin(
                state.timeline,
                None if state.checkpoint else 0,
                None if state.checkpoint else state.timeline,
                kept,
            )
        return Origin(state.timeline, ref.step, ref.timeline, kept)

    def _result(self) -> dict[str, Any] | None:
        """For trackers, once the job has ended and they can read all of it."""
        state = self.job.state
        return (
            result_of(state.phase, state.reason, state.result)
            if state.phase.final and self.series.all_stored
            else None
        )

    @property
    def storage_away(self) -> str:
        """Why a rollback cannot read its checkpoint now, or ""."""
        return self._supervisor.recovery.storage_away

    async def run(self) -> None:
        """Until the lock is lost (raises LockLost in an ExceptionGroup) or cancelled."""
        self._supervisor.take_members(self._watch.start(self._start.found.values()))
        contained = Containment(TERM_OVER, self._tell_failure)
        try:
            async with LongLivedGroup() as group:
                group.create_task(self.writer.run())
                group.create_task(self._watch.run(self._start.revision + 1))
                group.create_task(self._supervisor.run())
                group.create_task(contained.keep(self.series.run, "storing metrics"))
                if self.job.spec.trackers:
                    group.create_task(
                        contained.keep(self._tracking.run, "following the job for its trackers")
                    )
        finally:
            self.asks.changed()  # they learn that the term is over

    def _tell_failure(self, sentence: str) -> None:
        self._events.add([Event("leader_part_failed", sentence)])

    def _on_changes(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if isinstance(change, JobState) and change.phase is Phase.COMPLETED:
                self.series.note_result(change.result.metrics, change.timeline)
            if isinstance(change, Evaluation):
                self.series.note_evaluation(change)
        if any(isinstance(change, LOOKED_AT) for change in changes):
            self._supervisor.look_again()
        freed = freed_by(changes)
        if freed is None:
            self.asks.changed()
        elif freed:
            self.asks.freed(freed)

    def _on_events(self, events: Sequence[Event]) -> None:
        self._events.announce(events)
        if events:
            self._supervisor.look_again()


@dataclass(eq=False, repr=False)
class Master(TaskService, Leads[Term]):
    """`url` is where its REST API is served."""

    candidate: Candidate[Term] = field(init=False)
    #: Why it stepped down, until it leads again.
    setback: PeerError | LeaseLost | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.candidate = Candidate(
            self.name, "taking over the job (counting the dataset, reading the queues)"
        )

    def __repr__(self) -> str:
        role = (
            f"term {self.current_term.number}, {self.current_term.job}"
            if self.current_term
            else "standing by"
        )
        return f"<Master {self.name} at {self.url}: {role}>"

    # ---------------------------------------------------------------- life

    async def run(self, stopping: asyncio.Event) -> None:
        """Lead or stand by until `stopping`, then give up the lease at once. Raises errors that a new term
        would meet again."""
        await stand(self.etcd, self.ttl_s, stopping, self.lead, self._note_setback)

    def _note_setback(self, error: PeerError | LeaseLost) -> None:
        self.setback = error

    async def lead(self, lease: Lease) -> None:
        """Wait for the job's lock, take the job over and lead it until cancelled, or the lock is lost (raises
        LockLost, in an ExceptionGroup). Raises what `take_over` raises."""
        election = self.candidate.elected(
            self.etcd, self.keys.master_lock, lease, self.probe, url=self.url, network=self.network
        )
        async with election as lock:
            try:
                address = MasterAddress(url=self.url, term=lock.term)
                first = Put(self.keys.master_address, address.to_bytes(), lease.id)
                start = await take_over(self.etcd, self.keys, lock, self.spec, self.storage, first)
                term = self.candidate.current = Term(self, lock, start)
                self.setback = None
                self.events.begin(lambda: term.job.events, term.writer.tell)
                elected = f"{self.name} leads in term {lock.term}"
                told = Event("master_elected", elected, {"term": lock.term, "url": self.url})
                self.events.add([told, *start.news])
                await term.run()
            finally:
                self.events.end()

    # ---------------------------------------------------------------- as the only job that the process leads

    def find(self, job: str | None) -> Master:
        """Itself. Raises NotFound for another job."""
        if job not in (None, self.keys.job):
            msg = f"there is no job {job} here: this master leads job {self.keys.job} only"
            raise NotFound(msg, hint=name_problem(job or ""))
        return self

    def masters(self) -> tuple[Master]:
        return (self,)

    async def report_metrics(self, batch: MetricBatch, once: Once[None] | None = None) -> MetricsTaken:
        """They are kept by step, too."""
        await super().report_metrics(batch, once)
        series = self.term.series
        before = series.timeline
        taken = series.note(current_metrics(self.job, batch))
        if batch.whole and taken.next is not None:
            losses = {number: epoch.sums.get(LOSS) for number, epoch in series.epochs.items()}
            self.metrics.know_epochs(
                {number: (loss.total, loss.weight) for number, loss in losses.items() if loss}
            )
            if series.timeline != before:
                self.metrics.know_steps(series.step_losses())
        if batch.store:
            await series.store()
            taken = series.taken
        return taken

    # ---------------------------------------------------------------- waiting for a task

    async def acquire_task(self, ask: AcquireTask) -> TaskAnswer:
        """As TaskService does; if there is no task, the answer comes when there may be one, at most
        `ask.wait_s` later."""
        deadline = clock.monotonic() + ask.wait_s
        woken = False
        while True:
            asks = self.term.asks
            changes = asks.changes
            try:
                answer = await super().acquire_task(ask)
            except BaseException:
                if woken:
                    asks.freed(1)
                raise
            left_s = deadline - clock.monotonic()
            if answer.answer != "wait" or left_s <= 0:
                return answer
            woken = await asks.next(changes, left_s)

    # ---------------------------------------------------------------- state

    @property
    def writer(self) -> Writer:
        return self.term.writer

    @property
    def evictions(self) -> Evictions:
        return self.term.evictions


@dataclass(frozen=True, slots=True)
class Takeover:
    """What a new leader starts from. `revision`: of the reading; watches continue from the next one. `news`:
    of a job that it has opened."""

    commit_revision: int
    revision: int
    found: dict[str, KeyValue]
    job: Job
    news: tuple[Event, ...] = ()


async def take_over(
    etcd: Etcd,
    keys: Keys,
    lock: HeldLock,
    spec: JobSpec | None,
    storage: Callable[[JobSpec], JobStorage],
    *first: Put,
) -> Takeover:
    """Write `first` under the lock (a master's address), read every key, restore the job.

    Raises LockLost; NotFound without a spec; StateUnreadable; Conflict if `spec` is not the job's or the
    dataset has changed. StorageUnreachable: nothing is decided, and the next candidate tries again, perhaps
    with a better way to the storage. If the dataset cannot be read the job fails, and its state tells the
    user why; that is not raised.
    """
    form = schema_to_write(keys.schema, await etcd.get(keys.schema))
    commit_revision = await write_first(etcd, lock, keys.commit, [*first, *form])
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
        stored = found.get(keys.plan)
        if stored is None or read_record(EpochPlan, stored.key, stored.value) != plan:
            opening.append(Put(keys.plan, plan.to_bytes()))
            news = tuple(news_of(spec, table, plan)) if table is not None else ()
    else:
        schema.restore_events(job, keys, found)
        job.state = must_read(JobState, keys.state, found[keys.state].value)
        where = "counting the dataset's records"
        failure = UserFailure(
            error_type=type(unreadable).__name__,
            message=unreadable.message,
            traceback=str(unreadable.details.get("output", "")),  # what the user's code has printed last
            task=where,
        )
        for change in fail(job.state, unreadable.message, FailureCause.DATASET, failure).changes:
            job.apply(change, clock.monotonic())
        opening = [Put(keys.state, job.state.to_bytes())]
    if opening:
        commit_revision = await write_first(etcd, lock, keys.commit, opening)
    job.events.begin(commit_revision)
    log.info("took_over", lock=lock.key, term=lock.term, job=repr(job))
    return Takeover(commit_revision, revision, found, job, news)


def _agreed_spec(keys: Keys, found: dict[str, KeyValue], given: JobSpec | None) -> JobSpec:
    """The spec in etcd. `given` may differ in the numbers of members, in the digests of the script and in
    the history, which is that in etcd; in nothing else. Raises NotFound, Conflict."""
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
        name
        for name in JobSpec.model_fields
        if name not in ELASTIC and getattr(given, name) != getattr(spec, name)
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
    return given.with_fields(history=spec.history)


async def _open_job(
    meta: KeyValue | None, spec: JobSpec, storage: JobStorage
) -> tuple[Job, DatasetError | None]:
    """A job with nothing done. It has no tasks if the dataset cannot be read."""
    known = must_read(TaskMeta, meta.key, meta.value) if meta else None
    try:
        sizes = TaskSizes.of(spec, _task_records(spec, known, known.task_records if known else 0))
        table = await _table(storage, spec.dataset, sizes, known.digest if known else "")
        evaluation = None
        if spec.evaluation_dataset is not None:
            digest = known.evaluation_digest if known else ""
            sizes = TaskSizes.evaluated(
                spec, _task_records(spec, known, known.evaluation_task_records if known else 0)
            )
            evaluation = await _table(storage, spec.evaluation_dataset, sizes, digest)
    except DatasetError as error:
        log.warning("dataset_unreadable", cause=error.message)
        return Job.open(spec, FileTable((), 1), None), error
    return Job.open(spec, table, evaluation, known), None


def _task_records(spec: JobSpec, known: TaskMeta | None, of_table: int) -> int:
    """Records of a task in a job that has begun; 0: it begins now. Earlier versions did not say it."""
    return (of_table or spec.records_per_task or 16 * spec.minibatch_size) if known is not None else 0


async def _table(storage: JobStorage, source: Dataset, sizes: TaskSizes, digest: str) -> FileTable:
    """`digest`: of a job that has begun; a table that is lost is counted again then. Raises DatasetError,
    StorageUnreachable."""
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
        if (
            digest
            and isinstance(cause, OSError)
            and not isinstance(cause, FileNotFoundError | NotADirectoryError)
        ):
            raise StorageUnreachable(
                error.message, hint="make the dataset reachable; it is tried again"
            ) from error
        raise
    if not table.tasks:
        urls = ", ".join(source.urls)
        raise DatasetError(f"the dataset has no records: {urls}", hint="check the path or glob")
    return table

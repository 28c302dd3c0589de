"""What trainers ask and report. It decides through a writer: a master's, or (without a master) the trainer's
own."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeVar

from master_service.control.events import EventFeed
from master_service.control.evictions import Evictions
from master_service.core.changes import Decision, Event, Fields
from master_service.core.decisions import discarded_tasks, tasks
from master_service.core.decisions.discarded_tasks import AskedTask
from master_service.core.decisions.lifecycle import count_outside_tasks
from master_service.core.decisions.requests import Once
from master_service.core.decisions.tasks import (
    check_failure,
    check_trainer,
    current_metrics,
    warnings_told,
)
from master_service.core.state.job import BESIDE, Job
from master_service.core.state.metrics import Metrics
from master_service.storage.job_storage import FileStorage, JobStorage
from master_service.store.writer import Writer
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.runtime import clock, http
from trireme_shared.platform.runtime.http import own_network, tells
from trireme_shared.protocol.errors import NotFound
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import (
    AcquireTask,
    Completed,
    CompleteTask,
    FailTask,
    JobSpec,
    MetricBatch,
    MetricsTaken,
    Mode,
    PserverMember,
    TaskAnswer,
    TaskKind,
    TaskProgress,
    TrainerMember,
    UserFailure,
)
from trireme_shared.protocol.records.cluster import Kind


class WaitingAsks:
    """Requests for a task that wait in the master until there may be one for them.

    nothing to give ─► next(): in line ─► freed(n): the first n look again
                                       ─► changed(): all do
                                       ─► the limit is over: "wait" is answered

    `changes` counts what may have made tasks: who finds none after looking at it misses nothing by
    `next(changes, ...)`.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._line: dict[asyncio.Future[None], None] = {}

    def __len__(self) -> int:
        return len(self._line)

    def freed(self, tasks: int) -> None:
        """So many tasks were put back: each takes one of the line along."""
        self.changes += 1
        for waiting in list(self._line)[:tasks] if tasks < len(self._line) else [*self._line]:
            self._wake(waiting)

    def changed(self) -> None:
        """There may be tasks for any number of them, or another answer than to wait."""
        self.freed(len(self._line))

    async def next(self, changes: int, limit_s: float) -> bool:
        """Whether to look again: something came after `changes`, within `limit_s`. Who then takes nothing
        passes it on (`freed(1)`)."""
        if self.changes != changes:
            return True
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line[waiting] = None
        try:
            async with asyncio.timeout(limit_s):
                await waiting
        except TimeoutError:
            return False
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self.freed(1)
            raise
        finally:
            self._line.pop(waiting, None)
        return True

    def _wake(self, waiting: asyncio.Future[None]) -> None:
        self._line.pop(waiting, None)
        if not waiting.done():
            waiting.set_result(None)


REPORTED = 64  # failures that are kept to explain what goes on

A = TypeVar("A")
Probe = Callable[[str], Awaitable[bool]]


def note_awaited(job: Job, ask: AcquireTask, now: float) -> None:
    """In place and in memory only: a trainer asks for a task of an evaluation that has not begun. It does not
    train meanwhile, so no task of training is late."""
    status = job.evaluation
    if job.spec.mode is Mode.ASYNC or status.running is not None or ask.epoch <= status.settled:
        job.awaited = None
        return
    if job.awaited is None or job.awaited[0] != ask.epoch:
        job.awaited = ask.epoch, now
    job.training.grant_again(now)


@dataclass(eq=False, repr=False)
class TaskService(ABC):
    """`spec` is needed for a job's first leader only. `probe(url)`: whether nothing listens there. `network`:
    of this process. `reported`: the last failures of users' code, as (time, task or "", failure).
    `why_fewer(kind)`: who has the members of the cluster's pool that the job could use, as a sentence, or
    ""."""

    etcd: Etcd
    keys: Keys
    _: KW_ONLY
    name: str
    url: str
    spec: JobSpec | None = None
    ttl_s: float = 3.0
    storage: Callable[[JobSpec], JobStorage] = FileStorage
    probe: Probe = http.refuses_connections
    network: str = field(default_factory=own_network)
    why_fewer: Callable[[Kind], str] = lambda _: ""
    events: EventFeed = field(init=False, default_factory=EventFeed)
    metrics: Metrics = field(init=False, default_factory=Metrics)
    reported: deque[tuple[float, str, UserFailure]] = field(
        init=False, default_factory=lambda: deque(maxlen=REPORTED)
    )
    _probing: set[str] = field(init=False, default_factory=set)
    _warned: set[str] = field(init=False, default_factory=set)

    @property
    @abstractmethod
    def writer(self) -> Writer:
        """Raises NotLeader, NotReady."""

    @property
    @abstractmethod
    def evictions(self) -> Evictions:
        """Raises NotLeader, NotReady."""

    @property
    def job(self) -> Job:
        """To read. Raises NotLeader, NotReady."""
        return self.writer.job

    async def _decide(self, decision: Callable[[Job, float], Decision[A]], once: Once[A] | None) -> A:
        """`once`: of a request with an Idempotency-Key. Raises AnsweredBefore, IdempotencyKeyReused, what the
        decision raises."""
        return await self.writer.decide(once.decide(decision) if once is not None else decision)

    # ---------------------------------------------------------------- tasks

    async def acquire_task(self, ask: AcquireTask) -> TaskAnswer:
        """The same `request` asked twice gets the same pending task. Raises StaleGeneration, Conflict,
        InvalidArgument."""
        writer = self.writer
        if ask.stream is not None and ask.epoch > self.job.training.epoch and not ask.look:
            await writer.decide(lambda job, _: tasks.close_epoch(job, ask))
        if ask.index > 0 and not ask.look:
            self.job.budget.started = True
        if self.job.budget.counts.deaths:
            await writer.decide(lambda job, _: discarded_tasks.discard_deadly(job, ask))
        answer = await writer.decide(lambda job, _: tasks.acquire(job, ask))
        if ask.beside:
            note_awaited(writer.job, ask, clock.monotonic())
        return answer

    async def report_progress(
        self, task_id: str, report: TaskProgress, once: Once[None] | None = None
    ) -> None:
        """Moves the deadline. Nothing of it is written to etcd. Raises StaleAttempt, NotFound."""

        def check(job: Job, _: float) -> Decision[None]:
            tasks.report_progress(job, task_id, report)
            return Decision(None)

        if once is not None:
            await self.writer.decide(once.decide(check))
        queue, now = tasks.report_progress(self.job, task_id, report), clock.monotonic()
        alive = queue.sign_of_life(task_id, report.minibatches, now, report.work, report.waits_for)
        if alive and queue.kind in BESIDE:
            self.job.training.grant_again(now)  # training may wait for the evaluation

    async def complete_task(
        self, task_id: str, report: CompleteTask, once: Once[Completed] | None = None
    ) -> Completed:
        """A repeated report changes nothing, and gets the same next task. Raises StaleAttempt, NotFound."""
        writer = self.writer
        queue = writer.job.queue_of(task_id)
        held = queue.pending.get(task_id)
        completed = await self._decide(lambda job, _: tasks.complete_and_take(job, task_id, report), once)
        if held is not None:
            now = clock.monotonic()
            queue.deadlines.observe(now - held.last_sign, held.record.trainer)
            queue.late.observe(now - held.since)
            if queue.kind in BESIDE:
                writer.job.training.grant_again(now)
        if queue.kind is TaskKind.TRAIN:
            writer.job.budget.started = True
        self.metrics.moved_at = clock.monotonic()
        return completed

    async def fail_task(self, task_id: str, report: FailTask, once: Once[None] | None = None) -> None:
        """Counts against the task, and before a step is known to be done against the job; a death (`died_at`)
        against its place alone. Raises StaleAttempt, NotFound."""

        def decide(job: Job, _: float) -> Decision[None]:
            failed = tasks.fail_task if report.died_at is None else discarded_tasks.count
            return Decision(None) + failed(job, task_id, report)

        await self._decide(decide, once)
        self.reported.append((clock.monotonic(), task_id, report.failure))

    async def retry_task(self, task_id: str, by: str, once: Once[AskedTask] | None = None) -> AskedTask:
        """Of a discarded task. `by`: who asks, for people. Raises NotFound, Conflict, NotReady."""
        return await self._decide(lambda job, _: discarded_tasks.retry(job, task_id, by), once)

    async def skip_task(self, task_id: str, by: str, once: Once[AskedTask] | None = None) -> AskedTask:
        """It is discarded, without more attempts. Raises NotFound, Conflict, NotReady."""
        return await self._decide(lambda job, _: discarded_tasks.skip(job, task_id, by), once)

    async def report_failure(
        self, member_id: str, failure: UserFailure, once: Once[None] | None = None
    ) -> None:
        """The user's code failed outside a task (building the model, say). Raises NotFound unless that
        trainer is registered, or has said in etcd that it is starting; InvalidArgument."""
        writer = self.writer
        check_failure(member_id, failure)
        if once is not None:
            await writer.decide(once.check)
        if not await self._is_starting(member_id):
            check_trainer(writer.job, member_id)
        named = failure.with_fields(trainer=member_id)
        fields: Fields = {"member": member_id, "error_type": failure.error_type}
        told = Event("user_failure", f"{member_id}: {failure.error_type}: {failure.message}", fields)

        def decide(job: Job, _: float) -> Decision[None]:
            return Decision(None, (), (told,)) + count_outside_tasks(job, named)

        await self._decide(decide, once)
        self.reported.append((clock.monotonic(), "", named))

    async def _is_starting(self, member_id: str) -> bool:
        """Whether that trainer has said in etcd that it is there, without being registered (yet, or any
        more)."""
        registered = member_id in self.job.members.trainers
        return not registered and await self.etcd.get(self.keys.starting(member_id)) is not None

    # ---------------------------------------------------------------- members

    async def report_suspect(self, member_id: str, once: Once[bool] | None = None) -> bool:
        """Probe a member that is suspected dead (or all of that name), and end its registration if nothing
        listens at its url.

        Answers whether one was dead. A member that listens, or does not answer, stays as long as its lease;
        so does one whose url is a loopback address of another machine or container. Raises NotFound.
        """
        if once is None:
            return await self._end_if_dead(member_id)
        begun = await self.writer.decide(lambda job, _: once.begin(job, lambda: self.find_members(member_id)))
        try:
            dead = await self._end_if_dead(member_id)
        except NotFound:  # asked before, its answer was lost, and nobody of that name is registered now
            if not begun:
                raise
            dead = True
        return await self.writer.decide(lambda job, _: once.end(job, dead))

    async def _end_if_dead(self, member_id: str) -> bool:
        """Raises NotFound."""
        dead = False
        for suspect in self.find_members(member_id):
            self.evictions.suspect(suspect, self.job.spec.lease_ttl_s)
            if suspect.url in self._probing or not tells(suspect.url, suspect.network, self.network):
                continue
            self._probing.add(suspect.url)
            try:
                refused = await self.probe(suspect.url)
            finally:
                self._probing.discard(suspect.url)
            cause = f"{member_id} refuses connections at {suspect.url}"
            if refused and await self.evictions.end(suspect, cause):
                message = f"{cause}: it is dead"
                self.events.add([Event("member_dead", message, {"member": member_id, "url": suspect.url})])
                dead = True
        return dead

    def find_members(self, member_id: str) -> list[TrainerMember | PserverMember]:
        """By id (`trainer-0-9f2c51ab03de`, `pserver-1`, a pserver's incarnation) or by the name before it.
        Raises NotFound."""
        members = self.job.members
        if (trainer := members.trainers.get(member_id)) is not None:
            return [trainer]
        found: list[TrainerMember | PserverMember] = [
            m
            for m in members.trainers.values()
            if m.trainer == member_id or m.trainer.rpartition("-")[0] == member_id
        ]
        found += [
            m
            for m in members.pservers.values()
            if member_id
            in (f"pserver-{m.index}", f"ps-{m.index}", m.incarnation, m.incarnation.rpartition("-")[0])
        ]
        if not found:
            msg = f"no member {member_id} is registered in job {self.keys.job}"
            raise NotFound(msg)
        return found

    # ---------------------------------------------------------------- metrics

    async def _warn(self, warnings: Sequence[str]) -> None:
        """As events. Each once: every trainer meets the same script."""
        new = [text for text in warnings if text not in self._warned]
        self._warned.update(new)  # another trainer may tell it before it is written
        try:
            await self.writer.decide(lambda job, _: warnings_told(job, new))
        except BaseException:
            self._warned.difference_update(new)
            raise

    async def report_metrics(self, batch: MetricBatch, once: Once[None] | None = None) -> MetricsTaken:
        """In memory of the leader; a master keeps them in storage, too. Raises NotFound, InvalidArgument."""

        def check(job: Job, _: float) -> Decision[None]:
            current_metrics(job, batch)
            return Decision(None)

        if once is not None:
            await self.writer.decide(once.decide(check))
        current = current_metrics(self.job, batch)
        if batch.warnings:
            await self._warn(batch.warnings)
        if batch.steps:
            self.job.budget.started = True
        now = clock.monotonic()
        self.metrics.add(current, now)
        self.job.speeds.note(batch.trainer, batch.lane_s, batch.least_lane_s, now)
        return MetricsTaken(kept=False)

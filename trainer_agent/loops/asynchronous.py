"""Asynchronous training: tasks from one stream, a push every n minibatches, a pull every m.

    task (attempt > 1: resume at the lowest ledger entry) ─► minibatches [start, end) ─► weighted mean
        ─► push ─► pull

A push always covers minibatches [k n, (k + 1) n) of its task, in every attempt, and the ledger of each block
applies each minibatch exactly once. A pserver that came back from a checkpoint expects earlier minibatches:
the task resumes at its lowest ledger entry again. Tasks that were done when its losses were counted are lost
there: who still trains one of them gives it up (`_check_open`). A pserver that gives no answer may be skipped
while others answer; what it missed is reported with the task. With `max_staleness` a trainer waits before a
minibatch while another one computes with much older parameters (BoundedStaleness).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trainer_agent.core.duties import Duty
from trainer_agent.data import minibatches_in
from trainer_agent.data_plane.pulls import Abandoned, Within
from trainer_agent.data_plane.pushes import NodeSink, Outboxes, PushedRows, Verdict
from trainer_agent.data_plane.step_exchange import ParameterServers
from trainer_agent.loops.context import LoopContext, RolledBack, on_timeline, timeline_of
from trainer_agent.loops.evaluating import Evaluator
from trainer_agent.loops.lane_pusher import RowsAhead
from trainer_agent.membership.pause import PauseResponder
from trainer_agent.model.compute import LaneResult, Records, metrics_of
from trainer_agent.model.schedule import PushSchedule
from trainer_agent.tasks.activity import Held, LanePace
from trainer_agent.tasks.source import LoadedTask, TaskFailed, TrainingOver, outcome_of
from trainer_agent.tasks.steps import Times
from trainer_agent.waiting import Backoff, SingleErrorGroup, retry
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.errors import (
    DeadlineExceeded,
    Gone,
    PeerError,
    StaleGeneration,
    TriremeError,
    UserCodeError,
)
from trireme_shared.protocol.lanes import step_seed
from trireme_shared.protocol.records import JobSpec, Mode, PendingTask, Task, TaskKind
from trireme_shared.protocol.records.job import Paused
from trireme_shared.protocol.records.step import LaneZero
from trireme_shared.protocol.wire.messages import LedgerQuery, PushHeader, StalenessBound
from trireme_shared.tables.hashing import Ids
from trireme_shared.tables.payload import Rows

if TYPE_CHECKING:
    from trireme_shared.tables.lanes import LaneRows  # loads numba


PATIENCE = 0.5  # of a task's time limits: who waits gets no limit of its own into danger
REFRESH_S = 0.5
MARGIN = 1.5  # reading takes longer beside computing, and not each time as long
log = telemetry.logger("async_loop")
SCHEDULE_AHEAD = (
    "a task of this job has fewer pushes than the largest ones, which have {pushes}; the learning-rate "
    "schedule counts {pushes} for each task, as trireme.steps_per_epoch() does, so it runs ahead of the "
    "pushes that are made: choose records_per_task (or files) of which each task is full, or schedule_per = "
    "epoch"
)


class Superseded(Exception):
    """Another trainer has a higher attempt of the task."""


class Behind(Exception):
    """A parameter server came back from a checkpoint: it expects earlier minibatches of the task."""


class AsyncLoop:
    """`run` until there is nothing to train. It returns the task of another kind that the master gave
    instead, if any.

    `initial`: the schedule's state before any step; after a rollback the schedule starts there again."""

    def __init__(
        self,
        context: LoopContext,
        servers: ParameterServers,
        pauses: PauseResponder,
        initial: LaneZero,
        evaluator: Evaluator,
    ) -> None:
        self._pauses, self._initial, self._evaluator = pauses, initial, evaluator
        self._spec, self._directory, self._compute = context.spec, context.directory, context.compute
        self._servers, self._source, self._reports = servers, context.source, context.reports
        self._etcd = context.etcd
        self._dtypes, self._stopping, self._duty = context.gradient_dtypes, context.stopping, context.duty
        self._modulates = self._spec.lr_staleness_modulation
        servers.pulls.versions = {} if self._modulates else None
        self._bounded = BoundedStaleness(self._spec, self._source.trainer, servers, self._is_to_train)
        self.timeline = timeline_of(self._directory)
        self._next: asyncio.Task[LoadedTask | Task | TaskFailed | None] | None = None
        self._reading_pace = ReadingPace()
        self._held: Held | None = None
        self._ahead_rows = RowsAhead(context.compute, lambda _, ids: self._newest_rows(ids))
        self._following: tuple[Task, int, Records] | None = None  # a minibatch whose rows are asked for

    def __repr__(self) -> str:
        return f"<AsyncLoop of {self._source.trainer}: {self._held[0].task_id if self._held else 'no task'}>"

    #: lanes are those of synchronous jobs
    lane_pace = LanePace()

    @property
    def waits_for(self) -> str:
        """See BoundedStaleness.waits_for."""
        return self._bounded.waits_for

    def held(self) -> list[Held]:
        """The current task with how many of its minibatches are pushed, and the one that was fetched ahead:
        that is not late as long as any minibatch is pushed."""
        held = [self._held] if self._held else []
        if self._next is not None and self._next.done() and not self._next.cancelled():
            ahead = self._next.result()
            if isinstance(ahead, LoadedTask):
                held.append(Held(ahead.task, 0, self._reading_pace.pushed))
        return held

    def position(self) -> Paused:
        """The next minibatch to train, as a paused trainer reports it."""
        if self._held is None:
            return Paused(uuid="")
        task, minibatch, _ = self._held
        return Paused(
            uuid="",
            epoch=task.epoch,
            task_id=task.task_id,
            attempt=task.attempt,
            minibatch=minibatch,
            file=task.file,
            offset=task.first + min(task.count, minibatch * self._spec.minibatch_size),
        )

    @property
    def busy(self) -> bool:
        """Whether there is a current task."""
        return self._held is not None

    async def run(self) -> Task | None:
        async with SingleErrorGroup() as self._background:
            while True:
                self.timeline = timeline_of(self._directory)
                try:
                    return await on_timeline(self._directory, self.timeline, self._tasks())
                except RolledBack as error:
                    log.info("rolled_back", cause=str(error))
                finally:
                    self._held = None
                    self._ahead_rows.drop()
                    if self._next is not None:
                        self._next.cancel()
                        self._next = None

    async def _tasks(self) -> Task | None:
        """All tasks of one timeline of the job."""
        self._compute.restore(self._initial)
        self._pulled, self._unpulled = False, 0
        infos = await self._servers.fleet.infos(self.timeline)
        known = [state for info in infos for state in info.schedules]
        self._schedule = PushSchedule(self._compute, known, self._spec.options_change)
        await self._pull()
        self._bounded.computes = False
        while await self._may_go_on():
            try:
                await self._bounded.let_go()
                found = await self._fetched()
                if isinstance(found, Task):
                    return found
                await self._train(found)
            except TrainingOver:
                return None
            except StaleGeneration:
                await self._directory.changed(self._directory.revision, REFRESH_S)
            except Superseded as error:
                self._held = None
                log.info("task_superseded", cause=str(error))
            except TaskFailed as failed:
                self._held = None
                log.warning("task_failed", task=failed.task.task_id, cause=str(failed.error))
                await self._source.fail(failed.task, failed.error, failed.place)
        await self._bounded.let_go()
        return await self._given_ahead()

    async def _given_ahead(self) -> Task | None:
        """Training is over. A task of another kind that this trainer got when it asked ahead: nobody else
        will do it."""
        if self._next is None or self._stopping.is_set() or self._duty().duty is Duty.LEAVE:
            return None
        ahead, self._next = await outcome_of(self._next), None
        return ahead if isinstance(ahead, Task) else None

    def _is_to_train(self) -> bool:
        return not self._stopping.is_set() and self._duty().duty in (Duty.TRAIN, Duty.WAIT)

    async def _may_go_on(self) -> bool:
        """Between minibatches: waits while the job is paused. False if training is over or this trainer is
        asked to stop."""
        while self._is_to_train():
            if self._duty().duty is not Duty.WAIT or self._pauses.lifted:
                return True
            await self._directory.changed(self._directory.revision, REFRESH_S)
        return False

    # ------------------------------------------------------------ tasks

    async def _fetched(self) -> LoadedTask | Task:
        """The next task with its records, fetched ahead if possible. Raises TrainingOver, TaskFailed,
        StaleGeneration."""
        if self._next is None:
            self._next = self._background.create_task(self._ahead())
        await self._evaluator.until_done(self._next)
        ahead = await outcome_of(self._next)
        self._next = None
        if isinstance(ahead, TaskFailed):
            raise ahead
        return ahead if ahead is not None else await self._fetch()

    async def _fetch(self) -> LoadedTask | Task:
        generation = self._servers.fleet.generation
        answer = await self._source.acquire(generation)
        if answer.task is None:
            raise TrainingOver
        if answer.task.kind is not TaskKind.TRAIN:
            return answer.task
        with self._reading_pace.reading():
            loaded = await self._source.load(answer.task)
        return replace(loaded, generation=generation)

    async def _ahead(self) -> LoadedTask | Task | TaskFailed | None:
        """None if anything fails: then `_fetch` asks again, and gets the error."""
        try:
            return await self._fetch()
        except TaskFailed as failed:
            return failed
        except (TriremeError, TrainingOver):
            return None

    async def _train(self, loaded: LoadedTask) -> None:
        """Raises TaskFailed, Superseded."""
        task, every = loaded.task, self._spec.push_every
        count = minibatches_in(len(loaded.shard), self._spec.minibatch_size)
        self._generation = self._servers.fleet.generation  # of the task's first push
        self._open_in = loaded.generation  # the newest one in which the task is known not to be done
        self._times, self._began = Times(), clock.monotonic()
        self._skipped: dict[int, int] = {}  # minibatches of the task that a pserver missed, by its index
        start = await self._resume_at(task, count) if task.attempt > 1 else 0
        while start < count:
            self._held = Held(task, start)
            if not await self._may_go_on():
                return
            if self._bounded.is_due and not await self._within_bound():
                return
            end = min(start - start % every + every, count)
            if self._next is None and (end == count or self._reading_pace.is_due(count - start)):
                self._next = self._background.create_task(self._ahead())
            try:
                with self._pauses.pushing():
                    await self._push_range(loaded, count, start, end)
            except Behind as error:
                log.info("task_falls_back", task=task.task_id, minibatch=start, cause=str(error))
                start = await self._resume_at(task, count)
            else:
                start = end
                if start < count:
                    self._held = Held(task, start)
                    if not self._bounded.computes:  # else others might wait for it meanwhile
                        await self._evaluator.between_pushes()
        skipped = {str(index): minibatches for index, minibatches in sorted(self._skipped.items())}
        done = self._source.completion(task, generation=self._generation, skipped=skipped)
        self._reports.complete(task, done)
        self._held = None
        await self._evaluator.between_pushes()

    async def _resume_at(self, task: Task, count: int) -> int:
        """The lowest minibatch that some block still expects. A pserver without an answer is taken to miss
        all before it."""
        self._generation = self._servers.fleet.generation
        query = LedgerQuery(epoch=task.epoch, task_id=task.task_id)
        ledgers = await self._servers.ledgers(query, self._spec.skip_after_seconds)
        start = min((count if ledger.closed else ledger.next for ledger in ledgers.values()), default=0)
        self._skipped = {
            index: start for index in self._servers.fleet.routes.blocks if start and index not in ledgers
        }
        log.info("task_resumed", task=task.task_id, attempt=task.attempt, minibatch=start)
        return start

    # ------------------------------------------------------------ minibatches [start, end) of a task

    async def _push_range(self, loaded: LoadedTask, count: int, start: int, end: int) -> None:
        task = loaded.task
        minibatches = {number: self._minibatch(loaded, number) for number in range(start, end)}
        number = self._push_number(task, count, start)
        keeps = self._bounded.keeps(self._unpulled + end - start, is_last=end == count)
        options = await self._schedule.options_of(
            task.epoch if self._spec.schedule_per == "epoch" else number
        )
        outboxes = Outboxes(self._servers.fleet.routes, self._dtypes, self._servers.pulls.versions)
        results: list[LaneResult] = []
        backoff = Backoff("an answer of any parameter server")
        while True:
            await self._check_open(task)
            header = PushHeader(
                **self._servers.fleet.envelope(),
                mode=Mode.ASYNC,
                trainer=self._source.trainer,
                lane_zero=options,
                epoch=task.epoch,
                task_id=task.task_id,
                attempt=task.attempt,
                start=start,
                end=end,
                minibatches=count,
                keeps=keeps,
            )
            async with self._servers.pushing(header, outboxes, self._spec.skip_after_seconds) as verdicts:
                if not results:
                    results = await self._gradients(task, minibatches, outboxes)
            if Verdict.FENCED in verdicts.values():
                raise Superseded(
                    f"attempt {task.attempt} of task {task.task_id} was overtaken by another trainer"
                )
            if set(verdicts.values()) == {Verdict.SKIPPED}:
                # nothing would be trained; waiting loses nothing
                await backoff.failed("none has taken the push")
            elif Verdict.STALE not in verdicts.values():
                break
            else:
                await self._newer_generation(header.generation)
        self._bounded.computes &= keeps
        if behind := [index for index, found in verdicts.items() if found is Verdict.BEHIND]:
            raise Behind(f"pservers {behind} expect earlier minibatches than {start}")
        if end < count and self._compute.layout.tables:
            self._following = task, end, self._minibatch(loaded, end)
            self._ahead_rows.ask(0, None, self._seed(task, end), self._following[2], self._background)
        for index, found in verdicts.items():
            if found is Verdict.SKIPPED:
                self._skipped[index] = self._skipped.get(index, 0) + end - start
        self._times.pushed()
        self._reports.share(metrics_of(results, number, task.epoch, task.timeline, options))
        self._unpulled += end - start
        if not self._bounded.is_on and self._unpulled >= self._spec.pull_every:
            await self._pull()
            self._times.pulled()
        began, self._began = self._began, clock.monotonic()
        self._reading_pace.trained(end - start, self._began - began)
        self._reports.spent(number, task.timeline, self._began - began, self._times)
        self._times = Times()

    async def _check_open(self, task: Task) -> None:
        """A parameter server that came back takes pushes of the generation in which its losses were counted,
        and of later ones. A push of such a generation has to be of a task that was not done then. That is
        certain if this attempt is still pending: etcd has everything that led to the state known here. Raises
        Superseded."""
        key = self._directory.keys.pending(task.task_id)
        while (mended := self._directory.known_state.mended) > self._open_in:
            found = await retry(lambda: self._etcd.get(key), f"whether task {task.task_id} is open")
            held = read_record(PendingTask, key, found.value if found else None)
            if held is None or held.epoch != task.epoch or not held.find(task.attempt, self._source.trainer):
                raise Superseded(
                    f"attempt {task.attempt} of task {task.task_id} was overtaken before a parameter server "
                    "came back"
                )
            self._open_in = mended

    async def _gradients(
        self, task: Task, minibatches: Mapping[int, Records], outboxes: Outboxes
    ) -> list[LaneResult]:
        """The weighted mean over the minibatches, block by block into the outboxes."""
        self._compute.forget_nodes()
        node = min(minibatches), max(minibatches) + 1
        sink = NodeSink(outboxes, node, self._compute, lanes=(0, 1))
        results: list[LaneResult] = []
        of_rows: list[Sequence[LaneRows]] = []
        if tables := self._compute.layout.tables:
            self._compute.read_rows(self._newest_rows)
        for number, records in minibatches.items():
            seed = self._seed(task, number)
            try:
                with self._times.computing():
                    ready = await self._ahead_rows.ready(0, None, seed, records)
                    if (following := minibatches.get(number + 1)) is not None:
                        self._ahead_rows.ask(
                            0, None, self._seed(task, number + 1), following, self._background
                        )
                        # it is collated before this one is computed: both need the thread
                        await asyncio.sleep(0)
                    results.append(await self._compute.gradient(node, number, seed, records, sink, ready))
            except UserCodeError as error:
                raise TaskFailed(task, error, f"minibatch {number}") from error
            of_rows.append(self._compute.lane_rows())
            self._reports.notice(results[-1], task=task.task_id, minibatch=number)
        if tables:
            count = sum(result.records for result in results)
            try:
                rows = self._servers.router.mean_rows(of_rows)
                versions = self._servers.rows.take_row_versions() if self._modulates else {}
                pushed = PushedRows(rows, count, versions=versions)
                outboxes.add_rows(0, pushed, self._servers.router.row_parts(outboxes.routes, rows))
            except UserCodeError as error:
                raise TaskFailed(task, error, f"minibatches {node[0]} to {node[1] - 1}") from error
        outboxes.close()
        return results

    def _minibatch(self, loaded: LoadedTask, number: int) -> Records:
        """The same object for whom its rows were asked for."""
        if self._following is not None and self._following[:2] == (loaded.task, number):
            return self._following[2]
        return self._source.minibatch(loaded, number)

    def _seed(self, task: Task, number: int) -> int:
        """Of the random numbers of a minibatch."""
        return step_seed(step_seed(self._spec.seed, task.epoch, int(task.task_id)), number, 0)

    async def _newest_rows(self, ids: Sequence[Ids]) -> Sequence[Rows]:
        """Of embedding tables."""
        backoff = Backoff("rows of the job's timeline")
        while True:
            try:
                return await self._servers.rows.lookup(None, ids)
            except Gone as error:  # our view of the job is older than the pserver's
                await backoff.failed(error)

    def _push_number(self, task: Task, count: int, start: int) -> int:
        """The number of this push if one trainer did all of the training in order, and each task had as many
        pushes as the largest."""
        every = self._spec.push_every
        pushes = -(
            -max(count, minibatches_in(self._directory.task_records, self._spec.minibatch_size)) // every
        )
        if -(-count // every) < pushes and self._initial.scheduler and self._spec.schedule_per == "step":
            self._reports.warn(SCHEDULE_AHEAD.format(pushes=pushes))
        return (task.epoch * task.stream_length + task.index) * pushes + start // every

    async def _newer_generation(self, generation: int) -> None:
        newer = "a new generation"
        with contextlib.suppress(DeadlineExceeded):
            await self._directory.wait_for(
                lambda _: self._servers.fleet.generation > generation, REFRESH_S, newer
            )

    async def _within_bound(self) -> bool:
        """Bounded staleness: pulls, once no live trainer computes with much older parameters. False: this
        trainer is to train no more."""
        try:
            await self._pull(self._bounded.pull)
        except Abandoned:
            return False
        if self._bounded.has_waited:
            self._ahead_rows.drop()  # they are as old as the wait was long
        self._times.pulled()
        return await self._may_go_on()

    async def _pull(self, pull: Callable[[float | None], Awaitable[object]] | None = None) -> None:
        """Every block, at whatever version it has. Raises what `pull` does (None: the servers')."""
        backoff = Backoff("pulling parameters of the job's timeline")
        while True:
            try:
                skip_after_s = self._spec.skip_after_seconds if self._pulled else None
                await (pull(skip_after_s) if pull else self._servers.pull(None, skip_after_s))
                break
            except Gone as error:  # our view of the job is older than the pserver's
                await backoff.failed(error)
        self._servers.swap()
        self._pulled, self._unpulled = True, 0


class ReadingPace:
    """How long this trainer takes to read a task and to train a minibatch. It asks for the next task so early
    that it is read when this one ends, and no earlier: another trainer may be idle by then, and train it.

    `pushed`: minibatches of all tasks."""

    def __init__(self) -> None:
        self.pushed = 0
        self._read_s = 0.0  # the last task's records
        self._minibatch_s = math.inf  # until one was pushed

    def __repr__(self) -> str:
        return f"<ReadingPace: {self._read_s:.3f} s a task to read, {self._minibatch_s:.3f} s a minibatch>"

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Around reading a task's records."""
        began = clock.monotonic()
        yield
        self._read_s = clock.monotonic() - began

    def trained(self, minibatches: int, seconds: float) -> None:
        """So many were pushed, in that time."""
        self.pushed += minibatches
        self._minibatch_s = seconds / minibatches

    def is_due(self, left: int) -> bool:
        """Whether reading a task takes as long as the minibatches that are `left` of this one."""
        return left * self._minibatch_s < MARGIN * self._read_s


class BoundedStaleness:
    """Before a minibatch this trainer waits while a live trainer computes with much older parameters.

        pull, once the bound holds ─► computes ─► push: computes no more with them ─► pull ...
            (pull_every above 1: the pushes between keep them)

    A parameter server counts a trainer from its pull to its push, so a trainer that waits, pauses, evaluates
    or has no task is waited for by nobody. `computes`: parameter servers count this trainer as one that
    computes with the parameters that it has. `is_needed`: whether it is still to train; asked while it waits.
    `has_waited`: in its last pull."""

    def __init__(
        self, spec: JobSpec, trainer: str, servers: ParameterServers, is_needed: Callable[[], bool]
    ) -> None:
        self._bound: StalenessBound | None = None
        if spec.max_staleness is not None:
            self._bound = StalenessBound(
                trainer=trainer,
                versions=spec.max_staleness,
                floor_s=PATIENCE * spec.task_timeout_floor_s,
                ceiling_s=PATIENCE * spec.task_timeout_ceiling_s,
            )
        self._servers, self._is_needed, self._pull_every = servers, is_needed, spec.pull_every
        self._within: Within | None = None
        self.computes = self.has_waited = False

    def __repr__(self) -> str:
        return f"<BoundedStaleness {self._bound!r}, {'computes' if self.computes else 'does not compute'}>"

    @property
    def is_on(self) -> bool:
        return self._bound is not None

    @property
    def is_due(self) -> bool:
        """Whether it has to pull before it computes."""
        return self._bound is not None and not self.computes

    def keeps(self, unpulled: int, *, is_last: bool) -> bool:
        """Whether it computes with the same parameters after a push. `unpulled`: minibatches since the pull,
        with those of the push; `is_last`: of its task."""
        return self.is_on and not is_last and unpulled < self._pull_every

    async def pull(self, skip_after_s: float | None = None) -> None:
        """Once no live trainer computes with much older parameters; then it computes. Raises Abandoned, Gone,
        InvalidArgument."""
        assert self._bound is not None
        within = self._within = Within(self._bound, self._is_needed)
        try:
            await self._servers.pull_within(within, skip_after_s)
        finally:
            # also if it is not known
            self.computes, self.has_waited, self._within = True, within.waited, None

    @property
    def waits_for(self) -> str:
        """As a sentence; "": it does not wait."""
        return "" if self._within is None else self._within.waits_for

    async def let_go(self) -> None:
        """It has no more use for its parameters, without a push that says so. If nobody hears it, others wait
        until their patience ends."""
        if not self.computes or self._bound is None:
            return
        self.computes = False
        try:
            await self._servers.pulls.let_go(self._bound)
        except (PeerError, StaleGeneration) as error:
            log.info("not_let_go", cause=error.message)

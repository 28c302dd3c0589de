"""What a trainer tells the master while it trains. Training never waits for it; all of it is retried and
bounded.

complete(task) ─► in order, until accepted or stale
share(step) ─► batches of metrics
suspect(member) ─► at most once a second
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from trainer_agent.model.compute import LaneResult
from trainer_agent.tasks.activity import PROGRESS_S, Activity, LanePace
from trainer_agent.tasks.master import MasterPort
from trainer_agent.tasks.steps import Times, TimesBuffer, WholeSteps
from trainer_agent.waiting import retry
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.runtime.containment import LongLivedGroup
from trireme_shared.protocol.errors import CallerError, PeerError, StaleAttempt, TriremeError
from trireme_shared.protocol.metrics import MOST_NAMES, Logged
from trireme_shared.protocol.records import (
    CompleteTask,
    MetricBatch,
    MetricsTaken,
    StepMetrics,
    Task,
    TaskProgress,
)
from trireme_shared.protocol.records.step import StepRecord, StepResult
from trireme_shared.protocol.records.tasks import MOST_WARNINGS, WAITS_FOR_CHARACTERS, MetricValue

QUEUED = 10_000
SUSPECT_EVERY_S = 1.0
METRICS_LIMIT_S = 30.0
SETTLE_S, SETTLE_PAUSE_S = 30.0, 0.25
TELL_S = 2.0
METRICS_EVERY_S, METRICS_STEPS, KEPT_STEPS = 0.5, 200, 2000
METRICS_VALUES = 4000  # so a report stays below the largest body that a master takes
# without steps: how often seconds per lane are told, and what is told at once
PACE_EVERY_S, PACE_CHANGE = 5.0, 1.2

Fetch = Callable[[int], Awaitable[Sequence[StepResult]]]

log = telemetry.logger("reports")


@dataclass
class MetricBuffer:
    """Steps not yet reported, one entry a step. Bounded: the oldest are dropped while the master is away."""

    steps: dict[int, StepMetrics] = field(default_factory=dict)
    since: float = 0.0
    dropped: int = 0

    def add(self, share: StepMetrics, now: float) -> None:
        """In place. A second share of the same step is added to the first, unless a rollback undid that."""
        if not self.steps:
            self.since = now
        known = self.steps.get(share.step)
        if known and known.timeline == share.timeline:
            share = share.with_fields(
                loss_sum=known.loss_sum + share.loss_sum,
                records=known.records + share.records,
                skipped=known.skipped + share.skipped,
                metrics=_summed(known.metrics, share.metrics),
            )
        self.steps[share.step] = share
        if len(self.steps) > KEPT_STEPS:
            del self.steps[next(iter(self.steps))]
            self.dropped += 1

    def due_in(self, now: float) -> float | None:
        """Seconds until a report is due; None: nothing to report."""
        if not self.steps:
            return None
        return 0.0 if len(self.steps) >= METRICS_STEPS else max(0.0, self.since + METRICS_EVERY_S - now)

    def take(self) -> tuple[StepMetrics, ...]:
        """In place: the oldest ones, as many as a report takes."""
        taken: list[StepMetrics] = []
        values = 0
        for share in self.steps.values():
            if len(taken) == METRICS_STEPS or values > METRICS_VALUES:
                break
            taken.append(share)
            values += len(share.metrics)
        for share in taken:
            del self.steps[share.step]
        return tuple(taken)


def _summed(known: Mapping[str, MetricValue], more: Mapping[str, MetricValue]) -> dict[str, MetricValue]:
    values = {
        name: Logged(value.total, value.weight, value.least, value.most) for name, value in known.items()
    }
    for name, value in more.items():
        one = Logged(value.total, value.weight, value.least, value.most)
        if name in values or len(values) < MOST_NAMES:
            values[name] = values[name].plus(one) if name in values else one
    return {name: MetricValue(**value._asdict()) for name, value in values.items()}


@dataclass
class Done:
    """Since the process began, for /metrics: what was reported, whether the master has heard it or not."""

    steps: int = 0
    records: int = 0
    skipped_records: int = 0
    tasks: int = 0


def _has_changed(told_s: float | None, now_s: float | None) -> bool:
    if told_s is None or now_s is None:
        return told_s is not now_s
    return not told_s / PACE_CHANGE <= now_s <= told_s * PACE_CHANGE


class Reports:
    """`run` in the agent's TaskGroup; the other methods never wait."""

    def __init__(
        self, master: MasterPort, trainer: str, activity: Activity, progress_s: float = PROGRESS_S
    ) -> None:
        """`activity`: the tasks that this trainer works on are told every `progress_s`."""
        self._master, self._trainer, self._activity = master, trainer, activity
        self._progress_s = progress_s
        self.done = Done()
        self._told_pace = LanePace(), -math.inf  # what was told last, and when
        self._completed: deque[tuple[Task, CompleteTask]] = deque()
        self._metrics = MetricBuffer()
        self.steps, self._whole_since = WholeSteps(), 0.0
        self._times = TimesBuffer()
        self._suspected: dict[str, float] = {}
        self._suspects: asyncio.Queue[tuple[str, str]] = asyncio.Queue(100)
        self._warnings, self._warned = list[str](), set[str]()
        self._more = asyncio.Event()
        self._idle = asyncio.Event()

    def complete(self, task: Task, done: CompleteTask) -> None:
        self.done.tasks += 1
        if len(self._completed) < QUEUED:
            self._completed.append((task, done))
            self._idle.clear()
            self._more.set()
        else:
            log.warning("report_dropped", task=task.task_id, queued=QUEUED)

    def share(self, share: StepMetrics) -> None:
        """A loss that is not finite goes to the log only: JSON cannot hold it."""
        if self.count(share):
            self._metrics.add(share, clock.monotonic())

    def count(self, share: StepMetrics) -> bool:
        """What this trainer has done of a step that the owner of lane 0 reports. Whether its loss is
        finite."""
        self.done.steps += 1
        self.done.records += share.records
        self.done.skipped_records += share.skipped
        finite = math.isfinite(share.loss_sum)
        if not finite:
            log.warning("loss_is_not_finite", step=share.step, epoch=share.epoch, records=share.records)
        return finite

    def notice(self, result: LaneResult, **where: str | int) -> None:
        """What is remarkable about a minibatch. Its warnings become events of the job, each once."""
        if result.skipped:
            log.warning("minibatch_skipped", records=result.skipped, **where)
        for text in result.warnings:
            self.warn(text, **where)

    def warn(self, text: str, **where: str | int) -> None:
        """Make a sentence an event of the job, once."""
        if text not in self._warned:
            log.warning("warning", message=text, **where)
            self._warned.add(text)
            self._warnings.append(text)

    def whole(self, record: StepRecord, timeline: int, grad_norm: float | None = None) -> None:
        """This trainer owns lane 0, and the step that made this version is done. `grad_norm`: of its
        gradient, if this trainer knows it."""
        result = record.result
        if (
            result is not None
            and result.grad_norm is None
            and grad_norm is not None
            and math.isfinite(grad_norm)
        ):
            result = result.with_fields(grad_norm=grad_norm)
        if not self.steps.active:
            self._whole_since = clock.monotonic()
        self.steps.add(result, record.version - 1, timeline)

    def spent(self, step: int, timeline: int, seconds: float, times: Times) -> None:
        """A step has ended: where its time went."""
        if seconds > 0:
            self._times.add(step, timeline, seconds, times)

    def suspect(self, member_id: str, cause: str) -> None:
        """A peer could not be reached. At most one report a second about each."""
        now = clock.monotonic()
        if (
            now - self._suspected.get(member_id, -SUSPECT_EVERY_S) >= SUSPECT_EVERY_S
            and not self._suspects.full()
        ):
            self._suspected[member_id] = now
            self._suspects.put_nowait((member_id, cause))

    async def run(self) -> None:
        async with LongLivedGroup() as group:
            for send in (
                self._send_completions,
                self._send_metrics,
                self._send_progress,
                self._send_suspects,
            ):
                group.create_task(send())

    async def flush(self, limit_s: float) -> None:
        """Wait until the master has accepted all reports, at most `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                while self._completed:
                    self._idle.clear()
                    await self._idle.wait()
                await self._report_metrics()
                while self._metrics.steps or self.steps.tellable or self._warnings:
                    await self._report_metrics()
        except TimeoutError:
            log.warning("reports_left", completions=len(self._completed))

    async def _send_completions(self) -> None:
        while True:
            self._more.clear()
            while self._completed:
                task, done = self._completed[0]
                await self._report(
                    partial(self._master.complete_task, task.task_id, done), f"completing task {task.task_id}"
                )
                self._completed.popleft()
            self._idle.set()
            await self._more.wait()

    async def _send_metrics(self) -> None:
        while True:
            due = self._due_in(clock.monotonic())
            if due == 0 or (due is None and self._pace_is_news()):
                await self._report_metrics()
            else:
                await asyncio.sleep(due or 0.25)

    def _due_in(self, now: float) -> float | None:
        """Seconds until a report is due; None: nothing to report."""
        if self._warnings:
            return 0.0
        if not self.steps.waiting:
            return self._metrics.due_in(now)
        many = self.steps.waiting >= METRICS_STEPS and self.steps.missing_from is None
        return 0.0 if many else max(0.0, self._whole_since + METRICS_EVERY_S - now)

    async def _report_metrics(self, *, store: bool = False) -> MetricsTaken | None:
        """What the master answers about whole steps."""
        pace, times = self._activity.lane_pace, self._times.take()
        whole, timeline, lost = store or self.steps.active, self.steps.timeline, self.steps.lost_before
        steps = self.steps.portion(METRICS_STEPS, METRICS_VALUES) if whole else self._metrics.take()
        warnings, self._warnings = self._warnings[:MOST_WARNINGS], self._warnings[MOST_WARNINGS:]
        if not (steps or any(pace) or times is not None or store or warnings):
            return None
        self._told_pace = pace, clock.monotonic()
        self._whole_since = clock.monotonic()
        batch = MetricBatch(
            trainer=self._trainer,
            steps=steps,
            lane_s=pace.lane_s,
            least_lane_s=pace.least_lane_s,
            times=times,
            whole=whole,
            lost_before=lost,
            store=store,
            warnings=tuple(warnings),
        )
        call = partial(self._master.report_metrics, batch)
        taken = await self._report(call, "reporting metrics", METRICS_LIMIT_S)
        if taken is None:
            self._warnings = warnings + self._warnings
        if whole and taken is None:
            self.steps.untold(steps)
        elif whole and isinstance(taken, MetricsTaken):
            self.steps.heard(taken, timeline)
            return taken
        return None

    async def tell_whole(self) -> None:
        """Training is over here: the master hears of all steps that this trainer can tell, at once. Whoever
        settles them knows less: the norms that this trainer measured are nowhere else."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TELL_S):
                while self.steps.tellable and await self._report_metrics() is not None:
                    pass

    async def settle(self, version: int, timeline: int, fetch: Fetch, limit_s: float = SETTLE_S) -> None:
        """Training is over with `version`: wait until the metrics of all steps are stored, at most `limit_s`.
        `fetch` asks parameter servers for results from a step on, once the owner of lane 0 has had a moment
        to tell them."""
        self.steps.reach(version, timeline)
        owner_tells = True
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    taken = await self._report_metrics(store=True)
                    if taken is not None and (not taken.kept or taken.stored >= version):
                        return
                    if (wanted := self.steps.missing_from) is not None and owner_tells:
                        owner_tells = False
                        await asyncio.sleep(SETTLE_PAUSE_S)
                    elif wanted is not None:
                        self.steps.filled(await fetch(wanted), wanted)
                    elif taken is None or not self.steps.waiting:
                        await asyncio.sleep(ids.jitter(SETTLE_PAUSE_S))
        except TimeoutError:
            log.warning("metrics_left", steps=repr(self.steps), seconds=limit_s)

    def _pace_is_news(self) -> bool:
        """A trainer whose lanes are all computed by others first has no steps to report, but it is slow: that
        must be known."""
        pace, (told, at) = self._activity.lane_pace, self._told_pace
        if not any(pace):
            return False
        changed = any(_has_changed(*pair) for pair in zip(told, pace, strict=True))
        return (
            changed and clock.monotonic() - at >= METRICS_EVERY_S
        ) or clock.monotonic() - at >= PACE_EVERY_S

    async def _send_progress(self) -> None:
        while True:
            await asyncio.sleep(self._progress_s)
            refused: list[Task] = []
            for task, minibatches, work in self._activity.held():
                progress = TaskProgress(
                    trainer=self._trainer,
                    attempt=task.attempt,
                    minibatches=minibatches,
                    work=work,
                    epoch=task.epoch,
                    timeline=task.timeline,
                    waits_for=self._activity.waits_for[:WAITS_FOR_CHARACTERS],
                )
                try:
                    await self._master.report_progress(task.task_id, progress)
                except TriremeError as error:
                    log.debug("report_refused", cause=str(error))
                    if isinstance(error, StaleAttempt):
                        refused.append(task)
            self._activity.give_up(refused)

    async def _send_suspects(self) -> None:
        while True:
            member_id, cause = await self._suspects.get()
            log.info("peer_suspected", member=member_id, cause=cause)
            await self._try(self._master.report_suspect(member_id))

    async def _report(
        self, call: Callable[[], Awaitable[object]], what: str, limit_s: float = 600.0
    ) -> object:
        """Until the master accepts it or refuses it as stale, or the limit is reached: then None."""
        try:
            return await retry(call, what, limit_s)
        except (CallerError, PeerError) as error:
            log.debug("report_refused", what=what, cause=str(error))
            return None

    async def _try(self, call: Awaitable[object]) -> None:
        try:
            await call
        except TriremeError as error:
            log.debug("report_refused", cause=str(error))

"""What a trainer tells the master beside the training: nothing of it is waited for, all of it is retried and bounded.

complete(task) ─► in order, until taken or stale      share(step) ─► batches of metrics      suspect(member) ─► once in a while
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

from shared.errors import CallerError, PeerError, TriremeError
from shared.records import CompleteTask, MetricBatch, StepMetrics, Task, TaskProgress
from shared.runtime import clock, telemetry
from trainer_agent.tasks.source import MasterPort
from trainer_agent.waiting.pacing import MetricBuffer
from trainer_agent.waiting.retry import persist

QUEUED = 10_000
SUSPECT_EVERY_S = 1.0
METRICS_LIMIT_S = 30.0
PROGRESS_S = 5.0

log = telemetry.logger("reports")


class Reports:
    """`run` in the agent's TaskGroup; the other methods never wait."""

    def __init__(self, master: MasterPort, trainer: str, held: Callable[[], list[tuple[Task, int]]]) -> None:
        """`held` names the tasks at hand with the minibatches done of each."""
        self._master, self._trainer, self._held = master, trainer, held
        self._completed: deque[tuple[Task, CompleteTask]] = deque()
        self._metrics = MetricBuffer()
        self._suspected: dict[str, float] = {}
        self._suspects: asyncio.Queue[tuple[str, str]] = asyncio.Queue(100)
        self._more = asyncio.Event()
        self._idle = asyncio.Event()

    def complete(self, task: Task, done: CompleteTask) -> None:
        if len(self._completed) < QUEUED:
            self._completed.append((task, done))
            self._idle.clear()
            self._more.set()
        else:
            log.warning("report_dropped", task=task.task_id, queued=QUEUED)

    def share(self, share: StepMetrics) -> None:
        """A loss that is not a number is told in the log only: JSON has no word for it."""
        if math.isfinite(share.loss_sum):
            self._metrics.add(share, clock.monotonic())
        else:
            log.warning("loss_is_not_finite", step=share.step, epoch=share.epoch, records=share.records)

    def suspect(self, member_id: str, cause: str) -> None:
        """A peer could not be reached; at most one report a second about each."""
        now = clock.monotonic()
        if now - self._suspected.get(member_id, -SUSPECT_EVERY_S) >= SUSPECT_EVERY_S and not self._suspects.full():
            self._suspected[member_id] = now
            self._suspects.put_nowait((member_id, cause))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send_completions())
            group.create_task(self._send_metrics())
            group.create_task(self._send_progress())
            group.create_task(self._send_suspects())

    async def flush(self, limit_s: float) -> None:
        """Wait until the master has taken what there is, at most `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                while self._completed:
                    self._idle.clear()
                    await self._idle.wait()
                await self._report_metrics()
        except TimeoutError:
            log.warning("reports_left", completions=len(self._completed))

    async def _send_completions(self) -> None:
        while True:
            self._more.clear()
            while self._completed:
                task, done = self._completed[0]
                await self._tell(
                    partial(self._master.complete_task, task.task_id, done), f"completing task {task.task_id}"
                )
                self._completed.popleft()
            self._idle.set()
            await self._more.wait()

    async def _send_metrics(self) -> None:
        while True:
            due = self._metrics.due_in(clock.monotonic())
            if due == 0:
                await self._report_metrics()
            else:
                await asyncio.sleep(due or 0.25)

    async def _report_metrics(self) -> None:
        steps = self._metrics.take()
        if steps:
            batch = MetricBatch(trainer=self._trainer, steps=steps)
            await self._tell(partial(self._master.report_metrics, batch), "reporting metrics", METRICS_LIMIT_S)

    async def _send_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            for task, minibatches in self._held():
                progress = TaskProgress(
                    trainer=self._trainer,
                    attempt=task.attempt,
                    minibatches=minibatches,
                    epoch=task.epoch,
                    timeline=task.timeline,
                )
                await self._once(self._master.report_progress(task.task_id, progress))

    async def _send_suspects(self) -> None:
        while True:
            member_id, cause = await self._suspects.get()
            log.info("peer_suspected", member=member_id, cause=cause)
            await self._once(self._master.report_suspect(member_id))

    async def _tell(self, call: Callable[[], Awaitable[object]], what: str, limit_s: float = 600.0) -> None:
        """Until the master has heard it, or it turns out to be stale, or the limit is reached."""
        try:
            await persist(call, what, limit_s)
        except (CallerError, PeerError) as error:
            log.debug("report_refused", what=what, cause=str(error))

    async def _once(self, call: Awaitable[object]) -> None:
        try:
            await call
        except TriremeError as error:
            log.debug("report_refused", cause=str(error))

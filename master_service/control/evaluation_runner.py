"""What the leader of a job does for evaluations while the job trains: it begins each once its checkpoint is committed.

checkpoint committed ─► begun      a later one is the latest, and the result depends on it ─► the job goes back
trainers wait for one whose checkpoint does not come within `recovery_timeout_s`, or before that of the last version ─► left out
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from master_service.core.changes import Decision
from master_service.core.decisions.evaluations import evaluation, lost_evaluation
from master_service.core.state.job import Job
from master_service.store.writer import Writer
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.protocol.records import AcquireTask, Mode

TICK_S = 1.0


def note_awaited(job: Job, ask: AcquireTask, now: float) -> None:
    """In place and in memory only: a trainer asks for a task of an evaluation that has not begun. It does not train meanwhile, so no
    task of training is late."""
    status = job.evaluation
    if job.spec.mode is Mode.ASYNC or status.running is not None or ask.epoch <= status.settled:
        job.awaited = None
        return
    if job.awaited is None or job.awaited[0] != ask.epoch:
        job.awaited = ask.epoch, now
    job.training.grant_again(now)


class EvaluationRunner:
    """Of one term. `look_again` after each change of the members or the checkpoints. `on_rollback`: the job has to go back."""

    def __init__(self, writer: Writer, on_rollback: Callable[[], None] = lambda: None) -> None:
        self._writer, self._on_rollback = writer, on_rollback
        self._changed = asyncio.Event()

    def look_again(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        """Until the writer's term ends (raises NotLeader) or cancelled."""
        if self._writer.job.spec.evaluate_every is None:
            return
        while True:
            if lost_evaluation.is_lost(self._writer.job):
                if await self._writer.decide(lambda job, _: lost_evaluation.go_back(job)):
                    self._writer.job.awaited = None
                    self._on_rollback()
            elif evaluation.next_due(self._writer.job) is not None:
                await self._writer.decide(lambda job, _: evaluation.begin(job))
            await self._leave_out_lost()
            await event_within(self._changed, TICK_S)
            self._changed.clear()

    async def _leave_out_lost(self) -> None:
        awaited, limit_s = self._writer.job.awaited, self._writer.job.spec.recovery_timeout_s
        if awaited is None:
            return
        if _last_is_saved(self._writer.job):
            cause = "its checkpoint was not written, and that of the last version is there"
        elif clock.monotonic() - awaited[1] > limit_s:
            cause = f"its checkpoint was not written within recovery_timeout_s {limit_s:g}"
        else:
            return

        def lost(job: Job, _now: float) -> Decision[None]:
            if job.evaluation.running is not None or evaluation.next_due(job) is not None:
                return Decision(None)
            return evaluation.leave_out(job, awaited[0], cause)

        await self._writer.decide(lost)
        self._writer.job.awaited = None


def _last_is_saved(job: Job) -> bool:
    """Whether no checkpoint of an earlier version can come any more."""
    latest = job.members.latest
    return latest is not None and latest.final and latest.timeline == job.state.timeline

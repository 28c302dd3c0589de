"""A paused checkpoint at one pserver: nobody trains, so all blocks are copied at one instant; then training goes on.

CHECKPOINTING, cut -> older pushes are stale -> copy -> `copied` in ps/<index> -> written in the background (parts.py)
"""

from __future__ import annotations

from pserver_service.context import PserverContext, StateFollower
from shared.records import JobState, Phase
from shared.records.step import StepRecord
from shared.runtime import clock, telemetry

log = telemetry.logger("pserver.pause")


class PausedCopy(StateFollower):
    """Copies the blocks once for each paused checkpoint."""

    def __init__(self, context: PserverContext) -> None:
        super().__init__(context)
        self._answered = ""

    def is_due(self, state: JobState) -> bool:
        if state.phase is not Phase.CHECKPOINTING or state.saving is None or not state.saving.cut:
            return False
        ready = self._pserver.store is not None and self._pserver.timeline == state.timeline
        return ready and self._answered != state.saving.uuid

    async def answer(self, state: JobState) -> None:
        assert state.saving is not None
        step, self._answered = state.saving.step, state.saving.uuid
        begin = clock.monotonic()
        self._pserver.copy_now(StepRecord(version=step, positions=()), state.generation)
        log.info("copied", index=self._pserver.index, step=step, seconds=round(clock.monotonic() - begin, 3))
        self._own_index.set(copied=self._answered)

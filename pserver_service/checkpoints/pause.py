"""A paused checkpoint at one pserver: nobody trains, so all blocks are copied at one instant; then training goes on.

CHECKPOINTING, cut -> older pushes are stale -> copy -> `copied` in ps/<index> -> written in the background (parts.py)
"""

from __future__ import annotations

from pserver_service.context import PserverContext
from shared.records import JobState, Phase
from shared.records.pauses import Saving
from shared.records.step import StepRecord
from shared.runtime import clock, telemetry

LOOK_S = 5.0

log = telemetry.logger("pserver.pause")


class PausedCopy:
    """Copies the blocks once for each paused checkpoint."""

    def __init__(self, context: PserverContext) -> None:
        self._directory, self._pserver, self._own_index = context.directory, context.pserver, context.own_index
        self._answered = ""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            revision, state = self._directory.revision, self._directory.state
            saving = self._due(state)
            if state is not None and saving is not None:
                self._copy(state, saving)
                continue
            await self._directory.changed(revision, LOOK_S)

    def _due(self, state: JobState | None) -> Saving | None:
        """The checkpoint to copy for, if that is still to do."""
        if state is None or state.phase is not Phase.CHECKPOINTING or state.saving is None or not state.saving.cut:
            return None
        ready = self._pserver.store is not None and self._pserver.timeline == state.timeline
        return state.saving if ready and self._answered != state.saving.uuid else None

    def _copy(self, state: JobState, saving: Saving) -> None:
        self._answered = saving.uuid
        begin = clock.monotonic()
        self._pserver.copy_now(StepRecord(version=saving.step, positions=()), state.generation)
        log.info("copied", index=self._pserver.index, step=saving.step, seconds=round(clock.monotonic() - begin, 3))
        self._own_index.set(copied=saving.uuid)

"""A paused checkpoint at one pserver: nobody trains, so all blocks are copied at one instant; then training goes on.

CHECKPOINTING, cut -> older pushes are stale -> copy -> `copied` in ps/<index> -> written in the background (shared/trireme_shared/checkpoints/parts.py)
                                                 |-- a long one: `copying` now and then, or the master takes it for frozen
                                                 `-- the pause was given up meanwhile: nothing is kept
"""

from __future__ import annotations

from pserver_service.checkpoints.copies import copy
from pserver_service.context import PserverContext, StateFollower
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.records import JobState, Phase
from trireme_shared.protocol.records.step import StepRecord

TELL_S = 0.5  # the master takes a parameter server for frozen that says nothing for three times as long

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
        step, uuid = state.saving.step, state.saving.uuid
        self._answered = uuid
        begin = told = clock.monotonic()

        def goes_on(blocks: int) -> bool:
            nonlocal told
            if clock.monotonic() - told >= TELL_S:
                told = clock.monotonic()
                self._own_index.set(copying=blocks)
            now = self._directory.state
            return now is not None and now.saving is not None and now.saving.uuid == uuid

        whole = await copy(self._pserver, StepRecord(version=step, positions=()), state.generation, goes_on)
        seconds = round(clock.monotonic() - begin, 3)
        log.info("copied" if whole else "copy_given_up", index=self._pserver.index, step=step, seconds=seconds)
        if whole:
            self._own_index.set(copied=uuid, copying=0)

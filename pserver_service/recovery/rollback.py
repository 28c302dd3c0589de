"""Rollback at one pserver: the job goes back to a checkpoint, so the pserver drops its parameters and loads those of it.

ROLLING_BACK seen -> drop (NOT_READY, older pushes stale) -> load (nothing if the job starts over) -> serve -> `restored` in ps/<index>
                                                            `-> cannot: `restored` says why; the master chooses another one
"""

from __future__ import annotations

import asyncio

from pserver_service.context import PserverContext, StateFollower
from pserver_service.handoff.follower import SlotFollower
from pserver_service.recovery.load import PAUSE_S, kept_checkpoints, load_checkpoint
from shared.errors import CheckpointUnusable, PeerError
from shared.records import JobState, Phase, Restored
from shared.records.checkpoints import CheckpointLatest, CheckpointRef
from shared.runtime import ids, telemetry

log = telemetry.logger("pserver.rollback")


class _Superseded(CheckpointUnusable):
    """The checkpoint is not kept any more."""


class Rollback(StateFollower):
    """Answers each rollback once: it was loaded, or why it could not be."""

    def __init__(self, context: PserverContext, follower: SlotFollower) -> None:
        super().__init__(context)
        self._follower = follower

    def is_due(self, state: JobState) -> bool:
        restored = self._own_index.record.restored
        done = restored is not None and (restored.timeline, restored.checkpoint) == (state.timeline, state.checkpoint)
        return state.phase is Phase.ROLLING_BACK and not done

    async def answer(self, state: JobState) -> None:
        log.info("rolling_back", index=self._pserver.index, timeline=state.timeline, checkpoint=state.checkpoint)
        self._pserver.drop(state.generation)
        restored = Restored(timeline=state.timeline, checkpoint=state.checkpoint)
        if not state.checkpoint:  # training starts over
            self._own_index.set(restored=restored, waits="")
            return
        while self._is_current(state):
            try:
                store, _ = await load_checkpoint(self.context, await self._kept(state.checkpoint))
                if not self._is_current(state):
                    return
                self._pserver.restore(store, state.timeline, state.checkpoint)
                self._follower.follow()  # the slot map may be newer
            except CheckpointUnusable as error:
                why = {"error": error.message, "superseded": isinstance(error, _Superseded)}
                restored = restored.model_copy(update=why)
            except PeerError as error:
                log.warning("restore_delayed", index=self._pserver.index, cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))
                continue
            if restored.error:
                log.error("checkpoint_unusable", index=self._pserver.index, message=restored.error)
            self._own_index.set(restored=restored, waits="")
            return

    async def _kept(self, uuid: str) -> CheckpointRef:
        """Raises CheckpointUnusable, PeerError."""
        refs = {ref.uuid: ref for ref in await kept_checkpoints(self.context, CheckpointLatest)}
        if uuid not in refs:
            raise _Superseded(f"checkpoint {uuid!r} is not among those kept: {', '.join(refs) or 'none'}")
        return refs[uuid]

    def _is_current(self, state: JobState) -> bool:
        now = self._directory.state
        return now is not None and (now.timeline, now.checkpoint) == (state.timeline, state.checkpoint)

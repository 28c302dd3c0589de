"""Roll-back at one pserver: the job goes back to a checkpoint, so the pserver drops its parameters and loads those of it.

ROLLING_BACK seen -> drop (NOT_READY, older pushes stale) -> load -> serve -> `restored` in ps/<index>
                                                            `-> cannot: `restored` says why; the master chooses another one
"""

from __future__ import annotations

import asyncio

from pserver_service.context import PserverContext
from pserver_service.core.store import Store
from pserver_service.recovery.load import load_checkpoint
from shared.errors import CheckpointUnusable, PeerError
from shared.etcd.reading import read_record
from shared.records import JobState, Phase, Restored
from shared.records.checkpoints import CheckpointLatest
from shared.runtime import ids, telemetry

LOOK_S = 5.0
PAUSE_S = 0.5

log = telemetry.logger("pserver.rollback")


class _Superseded(CheckpointUnusable):
    """The checkpoint is not kept any more."""


class Rollback:
    """Answers each roll-back once: it was loaded, or why it could not be."""

    def __init__(self, context: PserverContext) -> None:
        self._etcd, self._keys, self._directory = context.etcd, context.keys, context.directory
        self._pserver, self._own_index, self.context = context.pserver, context.own_index, context

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            revision, state = self._directory.revision, self._directory.state
            if state is not None and self.is_due(state):
                await self._roll_back(state)
                continue
            await self._directory.changed(revision, LOOK_S)

    def is_due(self, state: JobState) -> bool:
        """Whether this pserver has to answer the roll-back."""
        restored = self._own_index.record.restored
        done = restored is not None and (restored.timeline, restored.checkpoint) == (state.timeline, state.checkpoint)
        return state.phase is Phase.ROLLING_BACK and not done

    async def _roll_back(self, state: JobState) -> None:
        log.info("rolling_back", index=self._pserver.index, timeline=state.timeline, checkpoint=state.checkpoint)
        self._pserver.drop(state.generation)
        while self._is_current(state):
            cause, superseded = "", False
            try:
                store = await self._load(state)
                if not self._is_current(state):
                    return
                self._pserver.restore(store, state.timeline, state.checkpoint)
            except CheckpointUnusable as error:
                cause, superseded = error.message, isinstance(error, _Superseded)
            except PeerError as error:
                log.warning("restore_delayed", index=self._pserver.index, cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))
                continue
            if cause:
                log.error("checkpoint_unusable", index=self._pserver.index, message=cause)
            restored = Restored(
                timeline=state.timeline, checkpoint=state.checkpoint, error=cause, superseded=superseded
            )
            self._own_index.set(restored=restored, waits="")
            return

    async def _load(self, state: JobState) -> Store:
        """Raises CheckpointUnusable, PeerError."""
        found = await self._etcd.get(self._keys.latest)
        latest = read_record(CheckpointLatest, self._keys.latest, found.value if found else None)
        refs = {ref.uuid: ref for ref in latest.kept} if latest else {}
        if state.checkpoint not in refs:
            msg = f"checkpoint {state.checkpoint!r} is not among those kept: {', '.join(refs) or 'none'}"
            raise _Superseded(msg)
        ref = refs[state.checkpoint]
        store, _ = await load_checkpoint(self.context, ref)
        return store

    def _is_current(self, state: JobState) -> bool:
        now = self._directory.state
        return now is not None and (now.timeline, now.checkpoint) == (state.timeline, state.checkpoint)

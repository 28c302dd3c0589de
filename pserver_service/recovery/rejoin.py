"""Asynchronous: this pserver replaces one that died while the others go on. It loads its newest checkpoint and serves.

index claimed, job initialised, no parameters -> newest usable checkpoint -> `restored` in ps/<index> -> counted -> serve
                                                    `-> all are damaged: `restored` says why, and the master fails the job

Its ledger is older than the others'. Trainers whose pushes come too early resume where it stands. What it lacks of closed
tasks is lost; the master counts that from `restored`. It takes no push before that: a task that a push to it finished would be
counted as lost.
"""

from __future__ import annotations

import asyncio

from pserver_service.context import LOOK_S, PserverContext, StateFollower
from pserver_service.handoff.follower import SlotFollower
from pserver_service.recovery.load import PAUSE_S, kept_checkpoints, load_checkpoint
from shared.errors import CheckpointUnusable, NotReady, PeerError
from shared.records import JobState, Mode, Phase, Restored
from shared.records.checkpoints import CheckpointLatest, OwnCheckpoints
from shared.runtime import ids, telemetry
from shared.serving.core.store import Store

GOING_ON = (Phase.RUNNING, Phase.CHECKPOINTING)

log = telemetry.logger("pserver.rejoin")


class Rejoin(StateFollower):
    """Loads the parameters of a replaced parameter server, and tells the master which minibatches they lack."""

    def __init__(self, context: PserverContext, follower: SlotFollower) -> None:
        super().__init__(context)
        self._follower = follower

    def is_due(self, state: JobState) -> bool:
        spec, restored = self._directory.spec, self._own_index.record.restored
        answered = restored is not None and restored.timeline == state.timeline
        slots = self._directory.slots
        joined = state.joined.get(str(self._pserver.index)) == self._pserver.incarnation
        owner = slots is not None and self._pserver.index in slots.serving and not joined
        empty = self._directory.init_done and self._pserver.store is None and owner
        return spec is not None and spec.mode is Mode.ASYNC and state.phase in GOING_ON and empty and not answered

    async def answer(self, state: JobState) -> None:
        log.info("rejoining", index=self._pserver.index, timeline=state.timeline)
        while self._is_current(state):
            try:
                store, restored = await self._load(state.timeline)
            except CheckpointUnusable as error:
                lost = Restored(timeline=state.timeline, checkpoint="", error=error.message, rejoined=True)
                self._own_index.set(restored=lost, waits="")
                return
            except PeerError as error:
                log.warning("rejoin_delayed", index=self._pserver.index, cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))
                continue
            if not self._is_current(state):
                return
            self._own_index.set(restored=restored, waits="")
            await self._serve(state, store, restored)
            return

    async def _serve(self, state: JobState, store: Store, restored: Restored) -> None:
        """Once what is lacking is on record. The master limits how long a job waits for its parameters."""
        while (now := self._directory.state) is not None and self._is_current(state):
            if now.mends.get(str(self._pserver.index)) == self._pserver.incarnation:
                self._pserver.generation = max(self._pserver.generation, now.generation)
                self._pserver.restore(store, state.timeline, restored.checkpoint)
                self._follower.follow()  # the slot map may be newer
                return
            await self._directory.changed(self._directory.revision, LOOK_S)

    async def _load(self, timeline: int) -> tuple[Store, Restored]:
        """The newest usable checkpoint, and what to say of it. Raises CheckpointUnusable if none can be used, also none that is written
        meanwhile; PeerError, also while there is none at all: whether one comes, or the job starts over or fails, is the leader's to say."""
        kind = CheckpointLatest if self.context.spec.checkpoint_kind == "coordinated" else OwnCheckpoints
        damaged: dict[str, str] = {}
        while refs := [ref for ref in await kept_checkpoints(self.context, kind) if ref.uuid not in damaged]:
            try:
                store, positions = await load_checkpoint(self.context, refs[0])
            except CheckpointUnusable as error:
                log.warning("checkpoint_unusable", index=self._pserver.index, message=error.message)
                damaged[refs[0].uuid] = error.message
                continue
            return store, Restored(
                timeline=timeline,
                checkpoint=refs[0].uuid,
                rejoined=True,
                positions=positions,
                blocks=len(store.numbers),
                damaged="; ".join(damaged.values()),
            )
        if not damaged:
            raise NotReady(f"there is no checkpoint of pserver-{self._pserver.index} yet")
        found = f"{len(damaged)} cannot be used: {'; '.join(damaged.values())}"
        raise CheckpointUnusable(f"no checkpoint of pserver-{self._pserver.index} is left: {found}")

    def _is_current(self, state: JobState) -> bool:
        now = self._directory.state
        return now is not None and now.timeline == state.timeline and now.phase in GOING_ON

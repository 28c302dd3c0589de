"""Asynchronous: this pserver replaces one that died while the others go on. It loads its newest checkpoint and serves.

index claimed, job initialised, no parameters -> newest usable checkpoint -> serve -> `restored` in ps/<index>
                                                    `-> none left: `restored` says why, and the master fails the job

Its ledger is older than the others'. Trainers whose pushes come too early resume where it stands. What it lacks of closed
tasks is lost; the master counts that from `restored`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pserver_service.context import PserverContext
from pserver_service.core.store import Store
from pserver_service.recovery.load import load_checkpoint
from shared.errors import CheckpointUnusable, PeerError
from shared.etcd import LeaseLost
from shared.etcd.reading import read_record
from shared.records import JobState, Mode, Phase, Restored
from shared.records.checkpoints import CheckpointLatest, CheckpointRef, OwnCheckpoints
from shared.runtime import ids, telemetry

LOOK_S = 5.0
PAUSE_S = 0.5
GOING_ON = (Phase.RUNNING, Phase.CHECKPOINTING)

log = telemetry.logger("pserver.rejoin")


@dataclass(frozen=True, slots=True)
class _Found:
    """What was loaded; `damaged`: why newer checkpoints could not be used."""

    store: Store
    ref: CheckpointRef
    positions: dict[str, int]
    damaged: str


class Rejoin:
    """Loads the parameters of a replaced parameter server, and tells the master which minibatches they lack."""

    def __init__(self, context: PserverContext) -> None:
        self._etcd, self._keys, self._directory = context.etcd, context.keys, context.directory
        self._pserver, self._own_index, self.context = context.pserver, context.own_index, context

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            revision, state = self._directory.revision, self._directory.state
            if state is not None and self.is_due(state):
                await self._rejoin(state)
                continue
            await self._directory.changed(revision, LOOK_S)

    def is_due(self, state: JobState) -> bool:
        spec, restored = self._directory.spec, self._own_index.record.restored
        answered = restored is not None and restored.timeline == state.timeline
        empty = self._directory.init_done and self._pserver.store is None
        return spec is not None and spec.mode is Mode.ASYNC and state.phase in GOING_ON and empty and not answered

    async def _rejoin(self, state: JobState) -> None:
        log.info("rejoining", index=self._pserver.index, timeline=state.timeline)
        while self._is_current(state):
            try:
                found = await self._load()
            except CheckpointUnusable as error:
                restored = Restored(timeline=state.timeline, checkpoint="", error=error.message, rejoined=True)
                self._own_index.set(restored=restored, waits="")
                return
            except (PeerError, LeaseLost) as error:
                log.warning("rejoin_delayed", index=self._pserver.index, cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))
                continue
            if not self._is_current(state):
                return
            self._pserver.generation = max(self._pserver.generation, state.generation)
            self._pserver.restore(found.store, state.timeline, found.ref.uuid)
            restored = Restored(
                timeline=state.timeline,
                checkpoint=found.ref.uuid,
                rejoined=True,
                positions=found.positions,
                blocks=len(found.store.blocks),
                damaged=found.damaged,
            )
            self._own_index.set(restored=restored, waits="")
            return

    async def _load(self) -> _Found:
        """The newest usable checkpoint. Raises CheckpointUnusable if there is none, PeerError."""
        refs = await self._refs()
        damaged: list[str] = []
        for ref in refs:
            try:
                store, positions = await load_checkpoint(self.context, ref)
            except CheckpointUnusable as error:
                log.warning("checkpoint_unusable", index=self._pserver.index, message=error.message)
                damaged.append(error.message)
                continue
            return _Found(store, ref, positions, "; ".join(damaged))
        found = f"{len(damaged)} cannot be used: {'; '.join(damaged)}" if damaged else "there is none yet"
        msg = f"no checkpoint of pserver {self._pserver.index} is left: {found}"
        raise CheckpointUnusable(msg)

    async def _refs(self) -> tuple[CheckpointRef, ...]:
        """The checkpoints that may be loaded, newest first."""
        assert self._directory.spec is not None
        if self._directory.spec.checkpoint_kind == "coordinated":
            found = await self._etcd.get(self._keys.latest)
            latest = read_record(CheckpointLatest, self._keys.latest, found.value if found else None)
            return latest.kept if latest is not None else ()
        key = self._keys.own_checkpoints(self._pserver.index)
        found = await self._etcd.get(key)
        own = read_record(OwnCheckpoints, key, found.value if found else None)
        return own.kept if own is not None else ()

    def _is_current(self, state: JobState) -> bool:
        now = self._directory.state
        return now is not None and now.timeline == state.timeline and now.phase in GOING_ON

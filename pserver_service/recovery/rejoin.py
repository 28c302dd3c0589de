"""Asynchronous: this pserver took the place of one that died, the others go on; it loads its newest checkpoint and joins in.

index claimed, job initialised, no parameters -> newest checkpoint that is whole -> serve -> say so in ps/<index>
                                                    `-> none left: say why, and the master fails the job

Its ledger is older than the others'. Pushes that come too early tell trainers to resume where it stands; what it lacks of
tasks that are closed is lost, and the master counts it from what is said here.
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
    """What was loaded; `damaged`: what is wrong with newer ones."""

    store: Store
    ref: CheckpointRef
    positions: dict[str, int]
    damaged: str


class Rejoin:
    """Loads what a parameter server without parameters comes back with, and answers with what it lacks."""

    def __init__(self, context: PserverContext) -> None:
        self._etcd, self._keys, self._directory = context.etcd, context.keys, context.directory
        self._pserver, self._own_index, self.context = context.pserver, context.own_index, context

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            revision, state = self._directory.revision, self._directory.state
            if state is not None and self._is_due(state):
                await self._rejoin(state)
                continue
            await self._directory.changed(revision, LOOK_S)

    def _is_due(self, state: JobState) -> bool:
        spec, said = self._directory.spec, self._own_index.record.restored
        answered = said is not None and said.timeline == state.timeline
        empty = self._directory.init_done and self._pserver.store is None
        return spec is not None and spec.mode is Mode.ASYNC and state.phase in GOING_ON and empty and not answered

    async def _rejoin(self, state: JobState) -> None:
        log.info("rejoining", index=self._pserver.index, timeline=state.timeline)
        while self._is_current(state):
            try:
                found = await self._load()
            except CheckpointUnusable as error:
                said = Restored(timeline=state.timeline, checkpoint="", error=error.message, rejoined=True)
                self._own_index.set(restored=said, waits="")
                return
            except (PeerError, LeaseLost) as error:
                log.warning("rejoin_delayed", index=self._pserver.index, cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))
                continue
            if not self._is_current(state):
                return
            self._pserver.generation = max(self._pserver.generation, state.generation)
            self._pserver.restore(found.store, state.timeline, found.ref.uuid)
            said = Restored(
                timeline=state.timeline,
                checkpoint=found.ref.uuid,
                rejoined=True,
                positions=found.positions,
                blocks=len(found.store.blocks),
                damaged=found.damaged,
            )
            self._own_index.set(restored=said, waits="")
            return

    async def _load(self) -> _Found:
        """The newest that is whole. Raises CheckpointUnusable if there is none, PeerError."""
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
        """What may be loaded, newest first."""
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

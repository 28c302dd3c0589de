"""Roll-back at one pserver: the job goes back to a checkpoint, so its parameters are dropped and those of then are loaded.

ROLLING_BACK seen -> drop (NOT_READY, older pushes stale) -> load -> serve -> say so in ps/<index>
                                                            `-> cannot: say why; the master chooses another one
"""

from __future__ import annotations

import asyncio

from pserver_service import disk
from pserver_service.commit import read_latest
from pserver_service.core.store import Store
from pserver_service.disk import Offload
from pserver_service.registration import Registration
from pserver_service.service import Pserver
from shared import ids, telemetry
from shared.directory import Directory
from shared.errors import CheckpointUnusable, PeerError
from shared.etcd import Etcd, LeaseLost
from shared.keys import Keys
from shared.records import JobState, Phase, Restored

LOOK_S = 5.0
PAUSE_S = 0.5
STORAGE_TRIES = 4

log = telemetry.logger("pserver.rollback")


class Rollback:
    """`offload` runs what blocks."""

    def __init__(
        self,
        etcd: Etcd,
        keys: Keys,
        directory: Directory,
        pserver: Pserver,
        registration: Registration,
        offload: Offload,
    ) -> None:
        self._etcd = etcd
        self._keys = keys
        self._directory = directory
        self._pserver = pserver
        self._registration = registration
        self._offload = offload

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            revision, state = self._directory.revision, self._directory.state
            if state is not None and self._is_due(state):
                await self._roll_back(state)
                continue
            await self._directory.changed(revision, LOOK_S)

    def _is_due(self, state: JobState) -> bool:
        """Whether the job rolls back to something this pserver has not answered yet."""
        said = self._registration.member.restored
        done = said is not None and (said.timeline, said.checkpoint) == (state.timeline, state.checkpoint)
        return state.phase is Phase.ROLLING_BACK and not done

    async def _roll_back(self, state: JobState) -> None:
        log.info("rolling_back", index=self._pserver.index, timeline=state.timeline, checkpoint=state.checkpoint)
        self._pserver.drop(state.generation)
        troubles = 0
        while self._is_current(state):
            cause = ""
            try:
                store = await self._load(state)
                if not self._is_current(state):
                    return
                self._pserver.restore(store, state.timeline, state.checkpoint)
            except CheckpointUnusable as error:
                cause = error.message
            except PeerError as error:
                log.warning("restore_delayed", index=self._pserver.index, cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))
                continue
            except Exception as error:
                log.exception("restore_failed", index=self._pserver.index, troubles=troubles)
                troubles += 1
                if troubles < STORAGE_TRIES:
                    await asyncio.sleep(ids.jitter(PAUSE_S * 2**troubles))
                    continue
                cause = f"checkpoint {state.checkpoint} could not be read, {troubles} times: {error!r}"
            if cause:
                log.error("checkpoint_unusable", index=self._pserver.index, message=cause)
            await self._say(Restored(timeline=state.timeline, checkpoint=state.checkpoint, error=cause), state)
            return

    async def _load(self, state: JobState) -> Store:
        """Raises CheckpointUnusable, PeerError, and whatever storage raises."""
        found = await self._etcd.get(self._keys.latest)
        latest = read_latest(found.value if found else None)
        refs = {ref.uuid: ref for ref in latest.kept} if latest else {}
        if state.checkpoint not in refs:
            msg = f"checkpoint {state.checkpoint!r} is not among those kept: {', '.join(refs) or 'none'}"
            raise CheckpointUnusable(msg)
        layout, slots, spec = self._directory.layout, self._directory.slots, self._directory.spec
        if layout is None or slots is None or spec is None:
            raise PeerError("the layout or the slot map is not there yet")
        store: Store = await self._offload(
            disk.load,
            spec.storage,
            self._keys.job,
            layout.digest,
            refs[state.checkpoint],
            self._pserver.index,
            slots,
            self._pserver.schedule,
        )
        if self._directory.slots != slots:
            raise PeerError("the slot map changed while the checkpoint was read")
        return store

    async def _say(self, restored: Restored, state: JobState) -> None:
        while self._is_current(state):
            try:
                await self._registration.tell(restored)
            except (PeerError, LeaseLost) as error:
                log.warning("etcd_away", index=self._pserver.index, cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))
            else:
                return

    def _is_current(self, state: JobState) -> bool:
        now = self._directory.state
        return now is not None and (now.timeline, now.checkpoint) == (state.timeline, state.checkpoint)

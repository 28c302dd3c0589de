"""Roll-back at one trainer of a collective job: the job goes back to a checkpoint, so each trainer loads all of it.

ROLLING_BACK seen ─► forget ─► load ─► `holds` in trainers/<id>
                        |─► cannot: `holds.error` says why; the master chooses another one
                        `─► the storage is not reached: again, until the others go on without this trainer
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from trainer_agent.collective.replica import Replica
from trainer_agent.collective.state.loading import load_replica
from trainer_agent.model.compute import Compute
from trireme_shared.checkpoints.writer import Offload
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.membership.own_key import OwnKey
from trireme_shared.platform.runtime import ids, telemetry
from trireme_shared.protocol.errors import CheckpointUnusable, PeerError
from trireme_shared.protocol.records import Holding, JobSpec, JobState, Phase, TrainerMember
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointRef

LOOK_S = 5.0
PAUSE_S = 0.5
TRIES = 4

log = telemetry.logger("collective.restoring")


class _Superseded(CheckpointUnusable):
    """The checkpoint is not kept any more."""


class Restorer:
    """Answers each roll-back once: it was loaded, or why it could not be. `idle`: held by whoever uses the parameters; `swapping`: while a minibatch is
    evaluated. `drop` is called before the replica
    forgets its version, `began` when it has another one."""

    def __init__(
        self,
        spec: JobSpec,
        etcd: Etcd,
        directory: Directory,
        own_key: OwnKey[TrainerMember],
        offload: Offload,
        compute: Compute,
        replica: Replica,
        idle: asyncio.Lock,
        swapping: asyncio.Lock,
        drop: Callable[[], None] = lambda: None,
        began: Callable[[], None] = lambda: None,
    ) -> None:
        self._spec, self._etcd, self._directory = spec, etcd, directory
        self._own_key, self.offload = own_key, offload
        self._compute, self._replica, self._idle, self._swapping = compute, replica, idle, swapping
        self._drop, self._began = drop, began

    def __repr__(self) -> str:
        return f"<Restorer of {self._own_key.record.trainer}: {self._replica!r}>"

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            revision, state = self._directory.revision, self._directory.state
            if state is not None and self.is_due(state):
                await self._answer(state)
            else:
                await self._directory.changed(revision, LOOK_S)

    def is_due(self, state: JobState) -> bool:
        holds = self._own_key.record.holds
        done = holds is not None and (holds.timeline, holds.checkpoint) == (state.timeline, state.checkpoint)
        return state.phase is Phase.ROLLING_BACK and bool(state.checkpoint) and not done

    async def _answer(self, state: JobState) -> None:
        log.info("rolling_back", timeline=state.timeline, checkpoint=state.checkpoint)
        holds = Holding(timeline=state.timeline, checkpoint=state.checkpoint)
        async with self._idle:
            self._drop()
            self._replica.forget()  # also if nothing is loaded: what it has is of another timeline
            while self._is_current(state):
                try:
                    ref = await self._kept(state.checkpoint)
                    await self._load(ref, state)
                except CheckpointUnusable as error:
                    unusable = holds.with_fields(error=error.message, superseded=isinstance(error, _Superseded))
                    self._own_key.set(holds=unusable, waits="")
                    return
                except PeerError as error:
                    log.warning("restore_delayed", cause=str(error))
                    if self._others_went_on(state):
                        self._replica.forget()
                        self._own_key.set(waits="")
                        return
                    await asyncio.sleep(ids.jitter(PAUSE_S))
                    continue
                if not self._is_current(state):
                    self._replica.forget()
                    return
                version = self._replica.version
                log.info("restored", timeline=state.timeline, checkpoint=state.checkpoint, version=version)
                self._began()
                self._own_key.set(holds=holds.with_fields(version=ref.step), waits="")
                return

    async def _load(self, ref: CheckpointRef, state: JobState) -> None:
        """Raises CheckpointUnusable; PeerError: again later."""
        cause = ""
        place = self._spec.storage, self._spec.job
        for attempt in range(TRIES):
            try:
                async with self._swapping:
                    await self.offload(
                        load_replica, *place, ref, self._spec.lanes, self._compute, self._replica, state.timeline
                    )
            except (CheckpointUnusable, PeerError):
                raise
            except ConnectionError as away:
                msg = f"the storage is not reached: {away}"
                if not self._own_key.record.waits:  # written once, for people to read
                    who = self._own_key.record.trainer
                    self._own_key.set(waits=f"{who} waits to load checkpoint {ref.uuid} (step {ref.step}): {msg}")
                raise PeerError(msg) from away
            except Exception as error:
                cause = f"checkpoint {ref.uuid} (step {ref.step}) could not be read, {attempt + 1} times: {error!r}"
                log.exception("checkpoint_unread", cause=cause)
                await asyncio.sleep(ids.jitter(PAUSE_S * 2**attempt))
            else:
                return
        raise CheckpointUnusable(cause)

    async def _kept(self, uuid: str) -> CheckpointRef:
        """Raises CheckpointUnusable, PeerError."""
        key = self._directory.keys.latest
        found = await self._etcd.get(key)
        record = read_record(CheckpointLatest, key, found.value if found else None)
        refs = {ref.uuid: ref for ref in (record.kept if record is not None else ())}
        if uuid not in refs:
            raise _Superseded(f"checkpoint {uuid!r} is not among those kept: {', '.join(refs) or 'none'}")
        return refs[uuid]

    def _others_went_on(self, state: JobState) -> bool:
        """From the checkpoint, without this trainer: it gets everything from them (following.py), and must not hold the parameters until the storage is there."""
        now = self._directory.state
        return now is not None and now.phase is not Phase.ROLLING_BACK and self._is_current(state)

    def _is_current(self, state: JobState) -> bool:
        now = self._directory.state
        return now is not None and (now.timeline, now.checkpoint) == (state.timeline, state.checkpoint)

"""Recovery, as the master does it: read the checkpoint's manifest, restore the queue, RUNNING again.

ROLLING_BACK: manifest read -> every pserver has loaded the checkpoint -> queue restored, in parts -> RUNNING
collective: the first trainers have loaded it -> the others get as long again, OTHERS_S at most -> as above
absent (asynchronous): a pserver is back -> manifest read -> its losses are counted and recorded
either takes too long: FAILED

Everything is decided from etcd and the manifest, so a master that takes over in the middle starts again from the beginning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from master_service.control.evictions import Evictions
from master_service.core.changes import Change, Decision, Event, NextEpoch
from master_service.core.decisions import collective, evaluation, recovery
from master_service.core.decisions.lifecycle import fail
from master_service.core.decisions.queue_at_checkpoint import (
    cut_in,
    epoch_at,
    missed_minibatches,
    read_cut,
    records_since_cut,
    records_since_positions,
    restore_to_cut,
    restore_to_positions,
)
from master_service.core.state.job import Job
from master_service.core.state.metrics import Metrics
from master_service.storage.job_storage import JobStorage
from master_service.store.writer import Writer, read_checkpoints
from trireme_shared.platform.etcd import Etcd, Get
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.protocol.errors import CheckpointUnusable, PeerError
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import FailureCause, JobState, Mode, Phase, PserverMember, Strategy
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointRef, Manifest, OwnCheckpoints
from trireme_shared.protocol.records.members import pserver_names

STORAGE_TRIES = 4
PAUSE_S = 0.5
AT_ONCE = 80  # changes in one transaction
OTHERS_S = 10.0  # for so long at most a roll-back waits for other trainers, once enough have loaded the checkpoint
LOOK_S = 0.1

log = telemetry.logger("recovery")


class Recovery:
    """Of one term. `advance` after each change of the members or the state: it does what can be done now."""

    def __init__(
        self,
        etcd: Etcd,
        keys: Keys,
        writer: Writer,
        storage: JobStorage,
        metrics: Metrics,
        evictions: Evictions,
    ) -> None:
        self._etcd, self._keys, self._writer, self._storage, self._metrics = etcd, keys, writer, storage, metrics
        self._evictions = evictions
        self._manifest: Manifest | None = None
        self.storage_away = ""  # why the storage cannot be reached
        self._since: float | None = None  # when the rollback or the absence began
        self._loaded: tuple[int, float] | None = None  # timeline, and when enough trainers had loaded its checkpoint

    @property
    def _job(self) -> Job:
        return self._writer.job

    async def advance(self) -> bool:
        """Whether something was decided, so that `advance` is due again."""
        await self._evict_survivors()
        state = self._job.state
        if state.phase is not Phase.ROLLING_BACK and not state.absent:
            self._since = None
            return await self._record_returns()
        if self._since is None:
            self._since = clock.monotonic()
        if state.phase is not Phase.ROLLING_BACK:
            return await self._record_returns()
        if not state.checkpoint:
            return False  # to the start: decisions.recovery.supervise does the rest
        manifest = await self._read(state)
        if manifest is None:
            return True
        job = self._job
        if not recovery.is_restored(job.spec, job.state, job.slots, job.members):
            return False
        if job.spec.strategy is Strategy.COLLECTIVE and self._others_load(job, clock.monotonic()):
            await asyncio.sleep(LOOK_S)
            return True
        return await self._restore_queue(state, manifest)

    def _others_load(self, job: Job, now: float) -> bool:
        """Collective: whether to wait for trainers that still load the checkpoint. They get as long again as the first ones took."""
        if self._loaded is None or self._loaded[0] != job.state.timeline:
            self._loaded = job.state.timeline, now
        first = self._loaded[1]
        took_s = first - (self._since if self._since is not None else first)
        waits = now < first + min(OTHERS_S, max(job.spec.join_window_s, took_s))
        return waits and bool(collective.still_loading(job.state, job.members))

    async def give_up_late(self) -> None:
        """Fail the job if parameters are missing for longer than `recovery_timeout_s`."""
        limit_s = self._job.spec.recovery_timeout_s
        if self._since is None or clock.monotonic() - self._since <= limit_s:
            return

        def late(job: Job, _now: float) -> Decision[None]:
            state = job.state
            if job.spec.strategy is Strategy.COLLECTIVE:
                return collective.give_up_loading(job.spec, state, job.members)
            needed = recovery.holders(job.spec, job.slots)
            missing = [i for i in needed if not recovery.has_parameters(state, job.members, i)]
            if not missing or (state.phase is not Phase.ROLLING_BACK and not state.absent):
                return Decision(None)
            there = [job.members.pservers[index] for index in missing if index in job.members.pservers]
            why = "".join(f" ({member.waits})" for member in there if member.waits)
            names = pserver_names(missing)
            return fail(
                state,
                f"{names} did not come back within recovery_timeout_s {limit_s:g}{why}",
                FailureCause.STORAGE if why else FailureCause.MEMBERS,
            )

        await self._writer.decide(late)

    async def _record_returns(self) -> bool:
        """Record the losses of pservers that came back. Whether something was decided: not once the job has ended."""
        job = self._job
        if job.spec.mode is not Mode.ASYNC or job.state.phase.final:
            return False
        back = recovery.returned(job.state, job.members)
        return any([await self._record_return(member) for member in back])

    async def _record_return(self, member: PserverMember) -> bool:
        """False: nothing was decided, it was only told to load again; what follows from that is news from etcd."""
        restored, state = member.restored, self._job.state
        assert restored is not None
        cut, error = None, ""
        try:
            if (ref := await self._ref_of(member)) is not None:
                cut = cut_in(await self._read_manifest(ref), self._job.slots)
        except CheckpointUnusable as unusable:
            error = unusable.message
        if cut is None and await self._ref_of(member) is None:
            cause = f"checkpoint {restored.checkpoint} was replaced by a newer one while it loaded; it loads again"
            await self._evictions.end(member, cause)
            return False

        def count(job: Job, _now: float) -> Decision[bool]:
            if job.state.timeline != state.timeline:
                return Decision(False)
            if cut is None:
                return Decision(False) + fail(
                    job.state, f"what pserver-{member.index} lost cannot be counted: {error}", FailureCause.STORAGE
                )
            key = str(member.index)
            before = cut.losses.lost.get(key, 0), cut.losses.skipped.get(key, 0)
            missed = missed_minibatches(job, cut, restored.positions) if restored.blocks else 0
            return recovery.record_return(job, member, missed, before)

        await self._writer.decide(count)
        self._job.training.grant_again(clock.monotonic())
        return True

    async def _ref_of(self, member: PserverMember) -> CheckpointRef | None:
        """The checkpoint that the pserver loaded, if it is still kept. Read from etcd, because the watches may be late."""
        keys, restored = self._keys, member.restored
        found = await self._etcd.txn([], [Get(keys.latest), Get(keys.own_checkpoints(member.index))])
        latest, own = found.range(0).first, found.range(1).first
        kept: list[CheckpointRef] = []
        if latest is not None and (newest := read_record(CheckpointLatest, latest.key, latest.value)) is not None:
            kept += newest.kept
        if own is not None and (alone := read_record(OwnCheckpoints, own.key, own.value)) is not None:
            kept += alone.kept
        return next((ref for ref in kept if restored is not None and ref.uuid == restored.checkpoint), None)

    async def _evict_survivors(self) -> None:
        """Without any checkpoint, pservers that still hold parameters have to leave."""
        job = self._job
        leaving = recovery.survivors(job.spec, job.state, job.slots, job.members)
        if not leaving:
            return
        there = await read_checkpoints(self._etcd, self._keys)
        if there.latest is not None or there.own:
            return
        for member in leaving:
            await self._evictions.end(member, "parameters are lost, no checkpoint exists yet")

    async def _read(self, state: JobState) -> Manifest | None:
        """The manifest of the checkpoint. None if it cannot be used; then another checkpoint is chosen, or the job fails."""
        if self._manifest is not None and self._manifest.uuid == state.checkpoint:
            return self._manifest
        ref = recovery.ref_of(self._job.members.latest, state.checkpoint)
        if ref is None:  # the watch may be late
            ref = recovery.ref_of((await read_checkpoints(self._etcd, self._keys)).latest, state.checkpoint)
        error = f"checkpoint {state.checkpoint} is not among those kept"
        try:
            if ref is not None:
                self._manifest = self._checked(await self._read_manifest(ref))
                return self._manifest
        except CheckpointUnusable as unusable:
            error = unusable.message

        def fall_back(job: Job, _now: float) -> Decision[None]:
            if job.state != state:
                return Decision(None)
            if ref is None and job.members.latest is not None:
                return recovery.choose_again(job.spec, job.state, job.slots, job.members.latest)
            return recovery.fall_back(job.spec, job.state, job.slots, job.members.latest, error)

        await self._writer.decide(fall_back)
        return None

    async def _read_manifest(self, ref: CheckpointRef) -> Manifest:
        """Raises CheckpointUnusable, also after STORAGE_TRIES errors of the storage. Raises PeerError if the storage cannot be
        reached: no other checkpoint can be read either, so waiting loses nothing."""
        error = ""
        for attempt in range(STORAGE_TRIES):
            try:
                manifest = await self._storage.read_manifest(ref)
            except ConnectionError as away:
                await self._report_storage_away(str(away))
                raise PeerError(f"the storage is not reached: {away}") from away
            except OSError as failed:
                error = f"checkpoint {ref.uuid} (step {ref.step}) could not be read {attempt + 1} times: {failed!r}"
                log.warning("manifest_unread", cause=error)
                await asyncio.sleep(ids.jitter(PAUSE_S * 2**attempt))
            else:
                self.storage_away = ""
                return manifest
        raise CheckpointUnusable(error)

    async def _report_storage_away(self, cause: str) -> None:
        """An event, once until the storage answers again."""
        known, self.storage_away = self.storage_away, cause
        if not known:
            waiting = Event("storage_away", f"the job waits for its storage to go back to a checkpoint: {cause}", {})
            await self._writer.decide(lambda _job, _now: Decision(None, (), (waiting,)))

    def _checked(self, manifest: Manifest) -> Manifest:
        """Raises CheckpointUnusable if the queue cannot go back to it."""
        lanes = len(manifest.record.positions)
        if self._job.spec.mode is Mode.ASYNC:
            read_cut(manifest.queue)
        elif lanes != self._job.spec.lanes:
            msg = f"checkpoint {manifest.uuid} (step {manifest.step}) has {lanes} lanes, the job has {self._job.spec.lanes}"
            raise CheckpointUnusable(msg)
        return manifest

    async def _restore_queue(self, state: JobState, manifest: Manifest) -> bool:
        """The queue as it was at the checkpoint, in parts; then RUNNING in one transaction. No task is given out before that."""
        step, positions = manifest.step, manifest.record.positions
        cut = cut_in(manifest, self._job.slots) if self._job.spec.mode is Mode.ASYNC else None
        if cut is not None:
            epoch, records = cut.epoch, records_since_cut(self._job, cut)
        else:
            epoch = epoch_at(positions)
            records = max(self._metrics.records_from(step), records_since_positions(self._job, positions))
        await self._write(state, (NextEpoch(epoch),))
        changes = restore_to_cut(self._job, cut) if cut is not None else restore_to_positions(self._job, positions)
        changes = (*changes, *evaluation.rewind(self._job, step))
        for first in range(0, len(changes), AT_ONCE):
            await self._write(state, changes[first : first + AT_ONCE])
        seconds = clock.monotonic() - (self._since or clock.monotonic())

        def resume(job: Job, _now: float) -> Decision[bool]:
            if job.state != state:
                return Decision(False)
            return recovery.resume(job, epoch, step, records=records, seconds=seconds)

        if await self._writer.decide(resume) and self._job.spec.mode is Mode.SYNC:
            self._metrics.rewind(step)
        return True

    async def _write(self, state: JobState, changes: Sequence[Change]) -> None:
        await self._writer.decide(lambda job, _: Decision(None, tuple(changes) if job.state == state else ()))

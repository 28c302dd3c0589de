"""Recovery from the master's side: who has to leave, what the checkpoint says, the queue rewound, RUNNING again.

ROLLING_BACK: manifest read -> every pserver says that it has restored -> queue rewound, in parts -> RUNNING
absent (asynchronous): a pserver is back -> manifest read -> what it lacks is counted and on record
too long for either: FAILED

Everything is decided from etcd and the manifest, so a master that takes over in the middle does it again from the start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from master_service.core.decisions import pserver_return, queue_restore, rollback
from master_service.core.decisions.lifecycle import fail
from master_service.core.state.changes import Change, Decision, Event, NextEpoch
from master_service.core.state.job import Job
from master_service.core.state.metrics import Metrics
from master_service.storage.job_storage import JobStorage
from master_service.store.writer import Writer
from shared.errors import CheckpointUnusable, PeerError
from shared.etcd import Etcd, Get
from shared.etcd.reading import read_record
from shared.keys import Keys
from shared.records import JobState, Mode, Phase, PserverMember
from shared.records.checkpoints import CheckpointLatest, CheckpointRef, Manifest, OwnCheckpoints
from shared.runtime import clock, ids, telemetry

STORAGE_TRIES = 4
PAUSE_S = 0.5
AT_ONCE = 80  # changes in one transaction

log = telemetry.logger("recovery")


class Recovery:
    """Of one reign. `advance` after each change of the members or the state: it does what can be done now."""

    def __init__(self, etcd: Etcd, keys: Keys, writer: Writer, storage: JobStorage, metrics: Metrics) -> None:
        self._etcd, self._keys, self._writer, self._storage, self._metrics = etcd, keys, writer, storage, metrics
        self._manifest: Manifest | None = None
        self._away = False  # the storage
        self._since: float | None = None  # the roll-back or the absence

    @property
    def _job(self) -> Job:
        return self._writer.job

    async def advance(self) -> bool:
        """Whether something was decided that asks for another look."""
        await self._clear_the_field()
        state = self._job.state
        if state.phase is not Phase.ROLLING_BACK and not state.absent:
            self._since = None
            return await self._mend()
        if self._since is None:
            self._since = clock.monotonic()
        if state.phase is not Phase.ROLLING_BACK:
            return await self._mend()
        manifest = await self._read(state)
        if manifest is None:
            return True
        job = self._job
        if not rollback.is_restored(job.spec, job.state, job.slots, job.members):
            return False
        return await self._rewind(state, manifest)

    async def give_up_late(self) -> None:
        """Fail the job if parameters are missing for longer than the spec allows: no wait is for ever."""
        limit_s = self._job.spec.recovery_timeout_s
        if self._since is None or clock.monotonic() - self._since <= limit_s:
            return

        def late(job: Job, _now: float) -> Decision[None]:
            state = job.state
            lacking = [i for i in range(job.spec.pservers) if not rollback.holds(state, job.members, i)]
            if not lacking or (state.phase is not Phase.ROLLING_BACK and not state.absent):
                return Decision(None)
            there = [job.members.pservers[index] for index in lacking if index in job.members.pservers]
            why = "".join(f" ({member.waits})" for member in there if member.waits)
            return fail(
                state,
                f"pservers {lacking} did not come back within recovery_timeout_s {limit_s:g}{why}; start the job again",
            )

        await self._writer.decide(late)

    async def _mend(self) -> bool:
        """Count what a pserver lacks that came back."""
        job = self._job
        back = pserver_return.returned(job.state, job.members) if job.spec.mode is Mode.ASYNC else []
        for member in back:
            await self._count(member)
        return bool(back)

    async def _count(self, member: PserverMember) -> None:
        said, state = member.restored, self._job.state
        assert said is not None
        cut, error = None, ""
        try:
            if (ref := await self._ref_of(member)) is not None:
                cut = queue_restore.read_cut((await self._read_manifest(ref)).queue)
        except CheckpointUnusable as unusable:
            error = unusable.message
        if cut is None and await self._ref_of(member) is None:
            cause = f"a newer checkpoint took the place of {said.checkpoint} while it came back; it comes again"
            log.warning("pserver_evicted", pserver=member.index, cause=cause)
            await self._etcd.revoke(member.lease)
            return

        def count(job: Job, _now: float) -> Decision[bool]:
            if job.state.timeline != state.timeline:
                return Decision(False)
            if cut is None:
                return Decision(False) + fail(job.state, f"what pserver {member.index} lost cannot be told: {error}")
            key = str(member.index)
            before = cut.losses.lost.get(key, 0), cut.losses.skipped.get(key, 0)
            lost = queue_restore.missed_minibatches(job, cut, said.positions) if said.blocks else 0
            return pserver_return.mend(job, member, lost, before)

        await self._writer.decide(count)
        self._job.training.grant_again(clock.monotonic())

    async def _ref_of(self, member: PserverMember) -> CheckpointRef | None:
        """The checkpoint that the pserver says it loaded, if it is kept. Asked in etcd: the watches may be behind it."""
        keys, said = self._keys, member.restored
        found = await self._etcd.txn([], [Get(keys.latest), Get(keys.own_checkpoints(member.index))])
        latest, own = found.range(0).first, found.range(1).first
        kept: list[CheckpointRef] = []
        if latest is not None and (newest := read_record(CheckpointLatest, latest.key, latest.value)) is not None:
            kept += newest.kept
        if own is not None and (alone := read_record(OwnCheckpoints, own.key, own.value)) is not None:
            kept += alone.kept
        return next((ref for ref in kept if said is not None and ref.uuid == said.checkpoint), None)

    async def _clear_the_field(self) -> None:
        """Without any checkpoint, pservers that still hold parameters leave: their leases are revoked."""
        job = self._job
        leaving = rollback.survivors(job.spec, job.state, job.members)
        if not leaving or await self._etcd.get(self._keys.latest) is not None:
            return
        for member in leaving:
            log.warning("pserver_evicted", pserver=member.index, cause="parameters are lost, no checkpoint exists yet")
            await self._etcd.revoke(member.lease)

    async def _read(self, state: JobState) -> Manifest | None:
        """The manifest of the checkpoint; None if it cannot be used, which is decided about."""
        if self._manifest is not None and self._manifest.uuid == state.checkpoint:
            return self._manifest
        ref = rollback.ref_of(self._job.members.latest, state.checkpoint)
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
                return rollback.choose_again(job.spec, job.state, job.slots, job.members.latest)
            return rollback.fall_back(job.spec, job.state, job.slots, job.members.latest, error)

        await self._writer.decide(fall_back)
        return None

    async def _read_manifest(self, ref: CheckpointRef) -> Manifest:
        """Raises CheckpointUnusable, also when the storage gives a wrong answer several times; PeerError when it is not
        reached: then no other checkpoint is either, and nothing is lost by waiting."""
        error = ""
        for attempt in range(STORAGE_TRIES):
            try:
                manifest = await self._storage.read_manifest(ref)
            except ConnectionError as away:
                await self._tell_away(str(away))
                raise PeerError(f"the storage is not reached: {away}") from away
            except OSError as trouble:
                error = f"checkpoint {ref.uuid} (step {ref.step}) could not be read {attempt + 1} times: {trouble!r}"
                log.warning("manifest_unread", cause=error)
                await asyncio.sleep(ids.jitter(PAUSE_S * 2**attempt))
            else:
                self._away = False
                return manifest
        raise CheckpointUnusable(error)

    async def _tell_away(self, cause: str) -> None:
        """Once, until it answers again."""
        if not self._away:
            self._away = True
            told = Event("storage_away", f"the job waits for its storage to go back to a checkpoint: {cause}", {})
            await self._writer.decide(lambda _job, _now: Decision(None, (), (told,)))

    def _checked(self, manifest: Manifest) -> Manifest:
        """Raises CheckpointUnusable if the queue cannot go back to it."""
        lanes = len(manifest.record.positions)
        if self._job.spec.mode is Mode.ASYNC:
            queue_restore.read_cut(manifest.queue)
        elif lanes != self._job.spec.lanes:
            msg = f"checkpoint {manifest.uuid} (step {manifest.step}) has {lanes} lanes, the job has {self._job.spec.lanes}"
            raise CheckpointUnusable(msg)
        return manifest

    async def _rewind(self, state: JobState, manifest: Manifest) -> bool:
        """The queue as it was at the checkpoint, then RUNNING in one transaction. Nobody is given a task meanwhile."""
        step, positions = manifest.step, manifest.record.positions
        cut = queue_restore.read_cut(manifest.queue) if self._job.spec.mode is Mode.ASYNC else None
        if cut is not None:
            epoch, records = cut.epoch, queue_restore.records_since_cut(self._job, cut)
        else:
            epoch = queue_restore.epoch_at(positions)
            records = max(self._metrics.records_from(step), queue_restore.records_since_positions(self._job, positions))
        await self._write(state, (NextEpoch(epoch),))
        if cut is not None:
            changes = queue_restore.restore_to_cut(self._job, cut)
        else:
            changes = queue_restore.restore_to_positions(self._job, positions)
        for first in range(0, len(changes), AT_ONCE):
            await self._write(state, changes[first : first + AT_ONCE])
        seconds = clock.monotonic() - (self._since or clock.monotonic())

        def resume(job: Job, _now: float) -> Decision[bool]:
            if job.state != state:
                return Decision(False)
            return rollback.resume(job, epoch, step, records=records, seconds=seconds)

        if await self._writer.decide(resume) and self._job.spec.mode is Mode.SYNC:
            self._metrics.rewind(step)
        return True

    async def _write(self, state: JobState, changes: Sequence[Change]) -> None:
        await self._writer.decide(lambda job, _: Decision(None, tuple(changes) if job.state == state else ()))

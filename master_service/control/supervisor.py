"""What the leader of a job does beside deciding on tasks: a master, or the trainer that sweeps a masterless
job.

members change -> membership (generation, lanes, phase) -> lost trainers' tasks go back
               |  joins: within a window, together
               |  etcd was silent: who is missing has the time of a lease to come back, before anything
               |  follows from it, unless it refuses connections
               `-> a rollback advances (Recovery); members join meanwhile, however slow the storage is
every second   -> tasks past their deadline -> requeued, discarded, or (lanes) their trainer evicted
                  late ones are marked
rebalance_s    -> lanes follow the measured speed
beside that    -> pauses for checkpoints (pause_runner.py), what was asked for (operation_runner.py),
                  evaluations (operation_runner.py)

Recovery reads the checkpoint's manifest, restores the queue, and lets the job run again:

ROLLING_BACK: manifest read -> every pserver has loaded the checkpoint -> queue restored, in parts -> RUNNING
collective: the first trainers have loaded it -> the others get as long again, OTHERS_S at most -> as above
absent (asynchronous): a pserver is back -> manifest read -> its losses are counted and recorded
either takes too long: FAILED

Everything is decided from etcd and the manifest, so a master that takes over in the middle starts again from
the beginning.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from master_service.control.evictions import Evictions
from master_service.control.operation_runner import EvaluationRunner, OperationRunner
from master_service.control.pause_runner import PauseRunner
from master_service.control.task_service import TaskService
from master_service.core import placement
from master_service.core.changes import Change, Decision, Event, NextEpoch
from master_service.core.decisions import collective, evaluation, membership, recovery, tasks
from master_service.core.decisions.collective import begins_without_some
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
from master_service.core.placement import FORGOTTEN_AFTER
from master_service.core.state.job import Job, Members
from master_service.core.state.metrics import Metrics
from master_service.storage.job_storage import JobStorage
from master_service.store.writer import HeldLock, Writer, is_due, read_checkpoints
from trireme_shared.platform.etcd import Etcd, Get
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership.directory import may_return_s
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.platform.runtime.containment import LongLivedGroup
from trireme_shared.platform.runtime.http import tells
from trireme_shared.protocol.errors import CheckpointUnusable, NotLeader, PeerError
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import (
    FailureCause,
    JobState,
    Mode,
    Phase,
    PserverMember,
    Strategy,
    TrainerMember,
)
from trireme_shared.protocol.records.checkpoints import (
    CheckpointLatest,
    CheckpointRef,
    Manifest,
    OwnCheckpoints,
)
from trireme_shared.protocol.records.members import pserver_names
from trireme_shared.protocol.records.setting_effects import without_effect

SWEEP_S, LONGEST_SWEEP_S = 1.0, 5.0
PAUSE_S = 0.5
SHORTEST_WAIT_S = 0.01
PROBE_S = 0.5  # a process that is dead is refused at once
PROBE_AGAIN_S = 0.5
STORAGE_TRIES = 4
AT_ONCE = 80  # changes in one transaction
# for so long at most a roll-back waits for other trainers, once enough have loaded the checkpoint
OTHERS_S = 10.0
LOOK_S = 0.1

log = telemetry.logger("supervisor")


class Supervisor:
    """Of one term. Each change of the members goes through `take_members`. `on_late(n)`: so many tasks may be
    given twice."""

    def __init__(
        self,
        service: TaskService,
        writer: Writer,
        lock: HeldLock,
        storage: JobStorage,
        on_late: Callable[[int], None] | None = None,
    ) -> None:
        etcd, keys = service.etcd, service.keys
        self.operations = OperationRunner(writer, storage, service.events, service.why_fewer)
        self.evictions = Evictions(etcd, keys, lock)
        self._writer, self._etcd, self._events = writer, etcd, service.events
        self._on_late = on_late or (lambda _: None)
        self._awaited = -math.inf  # the silence of etcd whose members were awaited last
        self._service = service
        # members that are there, and those that are awaited
        self._known: dict[str, TrainerMember | PserverMember] = {}
        self._told = Members()  # whose storage was told of last
        self._changed, self._recoverable = asyncio.Event(), asyncio.Event()
        self._window_ends = 0.0
        self.recovery = Recovery(etcd, keys, writer, storage, service.metrics, self.evictions)
        self._pauses = PauseRunner(etcd, keys, writer, lock.lease, on_end=self._changed.set)
        self._evaluations = EvaluationRunner(writer, self._changed.set)

    async def run(self) -> None:
        """Until the writer's term ends (raises NotLeader in an ExceptionGroup) or cancelled."""
        self._changed.set()
        job = self._writer.job
        if not job.state.generation:  # it has not begun
            self._events.add([Event("setting_unused", sentence, {}) for sentence in without_effect(job.spec)])
        async with LongLivedGroup() as group:
            group.create_task(self._reconcile_members())
            group.create_task(self._recover())
            group.create_task(self._sweep())
            group.create_task(self._rebalance())
            group.create_task(self._pauses.run())
            group.create_task(self.operations.run())
            group.create_task(self._evaluations.run())
            group.create_task(self.evictions.run())

    def take_members(self, members: Members) -> None:
        """Every part acts on `members` from now on; what they say of their storage is told as events."""
        self._events.add(membership.storage_events(self._told, members))
        self._writer.job.members = self._told = members
        self._changed.set()
        self._evaluations.look_again()
        self.look_again()

    def look_again(self) -> None:
        """Something has happened that operations, pauses, and those who follow the job may wait for."""
        self._pauses.look_again()
        self.operations.look_again()
        self._events.wake()

    async def _evict(self, trainer: str, reason: str) -> None:
        """End a trainer's membership: the watch sees its key vanish."""
        member = self._writer.job.members.trainers.get(trainer)
        if member is not None:
            await self.evictions.end(member, reason)

    async def _reconcile_members(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._gather_joins()
            if await self._members_may_return():
                continue
            before = self._writer.job.state
            await self._writer.decide(_reconcile)
            if self._writer.job.state != before:
                self._changed.set()  # a new phase may need more
            if (before.phase, self._writer.job.state.phase) == (Phase.WAITING, Phase.RUNNING):
                for queue in self._writer.job.open_queues:  # nobody could work on what is pending
                    queue.grant_again(clock.monotonic())
            while await self._writer.decide(lambda job, _: tasks.put_back_lost(job)):
                pass
            job = self._writer.job
            self.evictions.ended.intersection_update(
                membership.missing(job.spec, job.trainers, job.slots, job.members)
            )
            self._recoverable.set()

    async def _gather_joins(self) -> None:
        """Many join at once: those who come within `join_window_s` after a join make one generation. Who
        comes in a quiet time does not wait, nor does anything else: a death, a return, a rollback. A
        collective job begins with those who have the parameters within `join_window_s` after the first."""
        waited = False
        while True:
            job, now = self._writer.job, clock.monotonic()
            decision = _reconcile(job, now)
            begins = job.spec.strategy is Strategy.COLLECTIVE and begins_without_some(
                job.state, job.members, decision
            )
            if not begins and not membership.only_joins(job.state, job.trainers, decision):
                return
            if now >= self._window_ends:
                self._window_ends = now + job.spec.join_window_s
                if waited or not begins:
                    return
            waited = True
            await event_within(self._changed, self._window_ends - now)
            self._changed.clear()

    async def _members_may_return(self) -> bool:
        """Leases ran out while etcd was silent: whether members may still come back. Then it has waited for
        news of them."""
        job, silent_at = self._writer.job, self._etcd.silent_at
        away = set(membership.missing(job.spec, job.trainers, job.slots, job.members)) - self.evictions.ended
        left_s = may_return_s(silent_at, job.spec.lease_ttl_s)
        known: dict[str, TrainerMember | PserverMember] = dict(job.members.trainers)
        known |= {f"pserver-{index}": member for index, member in job.members.pservers.items()}
        self._known = {name: self._known[name] for name in away & self._known.keys()} | known
        if not away or left_s <= 0 or job.state.phase.final:
            return False
        if await self._find_dead(away):
            self._changed.set()
            return True
        if self._awaited != silent_at:
            message = f"etcd was silent: {', '.join(sorted(away)[:4])} may come back within {left_s:.1f} s"
            self._events.add([Event("members_awaited", message, {"members": len(away)})])
        self._awaited = silent_at
        await event_within(self._changed, max(SHORTEST_WAIT_S, min(left_s, PROBE_AGAIN_S)))
        self._changed.set()
        return True

    async def _find_dead(self, away: Collection[str]) -> bool:
        """Whether some of them do not come back: nobody listens where they did. Their keys may be gone since
        the launcher saw them die."""
        suspects = {name: self._known[name] for name in sorted(away) if name in self._known}

        async def is_dead(member: TrainerMember | PserverMember) -> bool:
            if not tells(member.url, member.network, self._service.network):
                return False
            with suppress(TimeoutError):
                async with asyncio.timeout(PROBE_S):
                    return await self._service.probe(member.url)
            return False

        found = await asyncio.gather(*map(is_dead, suspects.values()))
        dead = {name for name, refused in zip(suspects, found, strict=True) if refused}
        for name in dead:
            message = f"{name} refuses connections at {suspects[name].url}: it is dead"
            self._events.add([Event("member_dead", message, {"member": name, "url": suspects[name].url})])
        self.evictions.ended |= dead
        return bool(dead)

    async def _recover(self) -> None:
        """Beside the members: reading a manifest may take long."""
        while True:
            await self._recoverable.wait()
            self._recoverable.clear()
            try:
                if await self.recovery.advance():
                    self._changed.set()
            except NotLeader:
                raise
            except PeerError as error:  # etcd does not answer; what was read or revoked is done again
                log.warning("recovery_delayed", cause=error.message)
                await asyncio.sleep(ids.jitter(PAUSE_S))
                self._changed.set()

    async def _sweep(self) -> None:
        # no task has less time than the floor: a twentieth of it is no delay
        floor_s = self._writer.job.spec.task_timeout_floor_s
        interval = min(floor_s / 4, max(SWEEP_S, min(LONGEST_SWEEP_S, floor_s / 20)))
        while True:
            await asyncio.sleep(interval)
            await self.recovery.give_up_late()
            if found := tasks.find_late(self._writer.job, clock.monotonic()):
                self._on_late(found)
            if not is_due(self._writer, tasks.expire):
                continue
            late = await self._writer.decide(tasks.expire)
            if not late:
                continue
            self._writer.job.training.grant_again(clock.monotonic())
            for trainer in late:
                await self._evict(trainer, "its task ran over its time while other lanes wait for it")

    async def _rebalance(self) -> None:
        spec = self._writer.job.spec
        while spec.stragglers == "on":
            await asyncio.sleep(spec.rebalance_s)
            job = self._writer.job
            since = clock.monotonic() - FORGOTTEN_AFTER * spec.rebalance_s
            job.speeds.keep(job.members.trainers, since)
            await self._writer.decide(lambda job, _: membership.rebalance(job))


def _reconcile(job: Job, _now: float) -> Decision[None]:
    if job.spec.strategy is Strategy.COLLECTIVE:
        return collective.reconcile(job.spec, job.state, job.trainers, job.members, job.speeds.lane_s)
    return membership.reconcile(job.spec, job.state, job.trainers, job.slots, job.members, job.speeds.lane_s)


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
        self._etcd, self._keys, self._writer, self._storage, self._metrics = (
            etcd,
            keys,
            writer,
            storage,
            metrics,
        )
        self._evictions = evictions
        self._manifest: Manifest | None = None
        self.storage_away = ""  # why the storage cannot be reached
        self._since: float | None = None  # when the rollback or the absence began
        # timeline, and when enough trainers had loaded its checkpoint
        self._loaded: tuple[int, float] | None = None

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
        """Collective: whether to wait for trainers that still load the checkpoint. They get as long again as
        the first ones took."""
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
            needed = placement.holders(job.spec, job.slots)
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
        """Record the losses of pservers that came back. Whether something was decided: not once the job has
        ended."""
        job = self._job
        if job.spec.mode is not Mode.ASYNC or job.state.phase.final:
            return False
        back = recovery.returned(job.state, job.members)
        return any([await self._record_return(member) for member in back])

    async def _record_return(self, member: PserverMember) -> bool:
        """False: nothing was decided, it was only told to load again; what follows from that is news from
        etcd."""
        restored, state = member.restored, self._job.state
        assert restored is not None
        cut, error = None, ""
        try:
            if (ref := await self._ref_of(member)) is not None:
                cut = cut_in(await self._read_manifest(ref), self._job.slots)
        except CheckpointUnusable as unusable:
            error = unusable.message
        if cut is None and await self._ref_of(member) is None:
            cause = (
                f"checkpoint {restored.checkpoint} was replaced by a newer one while it loaded; it "
                "loads again"
            )
            await self._evictions.end(member, cause)
            return False

        def count(job: Job, _now: float) -> Decision[bool]:
            if job.state.timeline != state.timeline:
                return Decision(False)
            if cut is None:
                return Decision(False) + fail(
                    job.state,
                    f"what pserver-{member.index} lost cannot be counted: {error}",
                    FailureCause.STORAGE,
                )
            key = str(member.index)
            before = cut.losses.lost.get(key, 0), cut.losses.skipped.get(key, 0)
            missed = missed_minibatches(job, cut, restored.positions) if restored.blocks else 0
            return recovery.record_return(job, member, missed, before)

        await self._writer.decide(count)
        self._job.training.grant_again(clock.monotonic())
        return True

    async def _ref_of(self, member: PserverMember) -> CheckpointRef | None:
        """The checkpoint that the pserver loaded, if it is still kept. Read from etcd, because the watches
        may be late."""
        keys, restored = self._keys, member.restored
        found = await self._etcd.txn([], [Get(keys.latest), Get(keys.own_checkpoints(member.index))])
        latest, own = found.range(0).first, found.range(1).first
        kept: list[CheckpointRef] = []
        if (
            latest is not None
            and (newest := read_record(CheckpointLatest, latest.key, latest.value)) is not None
        ):
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
        """The manifest of the checkpoint. None if it cannot be used; then another checkpoint is chosen, or
        the job fails."""
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
        """Raises CheckpointUnusable, also after STORAGE_TRIES errors of the storage. Raises PeerError if the
        storage cannot be reached: no other checkpoint can be read either, so waiting loses nothing."""
        error = ""
        for attempt in range(STORAGE_TRIES):
            try:
                manifest = await self._storage.read_manifest(ref)
            except ConnectionError as away:
                await self._report_storage_away(str(away))
                raise PeerError(f"the storage is not reached: {away}") from away
            except OSError as failed:
                error = (
                    f"checkpoint {ref.uuid} (step {ref.step}) could not be read {attempt + 1} times: "
                    f"{failed!r}"
                )
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
            waiting = Event(
                "storage_away", f"the job waits for its storage to go back to a checkpoint: {cause}", {}
            )
            await self._writer.decide(lambda _job, _now: Decision(None, (), (waiting,)))

    def _checked(self, manifest: Manifest) -> Manifest:
        """Raises CheckpointUnusable if the queue cannot go back to it."""
        lanes = len(manifest.record.positions)
        if self._job.spec.mode is Mode.ASYNC:
            read_cut(manifest.queue)
        elif lanes != self._job.spec.lanes:
            msg = (
                f"checkpoint {manifest.uuid} (step {manifest.step}) has {lanes} lanes, the job has "
                f"{self._job.spec.lanes}"
            )
            raise CheckpointUnusable(msg)
        return manifest

    async def _restore_queue(self, state: JobState, manifest: Manifest) -> bool:
        """The queue as it was at the checkpoint, in parts; then RUNNING in one transaction. No task is given
        out before that."""
        step, positions = manifest.step, manifest.record.positions
        cut = cut_in(manifest, self._job.slots) if self._job.spec.mode is Mode.ASYNC else None
        if cut is not None:
            epoch, records = cut.epoch, records_since_cut(self._job, cut)
        else:
            epoch = epoch_at(positions)
            records = max(self._metrics.records_from(step), records_since_positions(self._job, positions))
        await self._write(state, (NextEpoch(epoch),))
        changes = (
            restore_to_cut(self._job, cut) if cut is not None else restore_to_positions(self._job, positions)
        )
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

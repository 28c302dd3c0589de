"""What the leader of a job does beside deciding on tasks: a master, or the trainer that sweeps a masterless job.

members change -> membership (generation, lanes, phase) -> lost trainers' tasks go back     joins: within a window, together
               |  etcd was silent: who is missing has the time of a lease to come back, before anything follows from it, unless it refuses connections
               `-> a rollback advances (recovery.py); members join meanwhile, however slow the storage is
every second   -> tasks past their deadline -> requeued, discarded, or (lanes) their trainer evicted; late ones are marked
rebalance_s    -> lanes follow the measured speed
beside that    -> pauses for checkpoints (pause_runner.py), what was asked for (operation_runner.py), evaluations (EvaluationRunner)
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from contextlib import suppress

from master_service.control.evictions import Evictions
from master_service.control.operation_runner import OperationRunner
from master_service.control.pause_runner import PauseRunner
from master_service.control.recovery import Recovery
from master_service.control.task_service import TaskService
from master_service.core.changes import Decision, Event
from master_service.core.decisions import evaluation, membership, recovery, tasks
from master_service.core.decisions.collective import begins_without_some
from master_service.core.placement import FORGOTTEN_AFTER
from master_service.core.state.job import Job
from master_service.storage.job_storage import JobStorage
from master_service.store.writer import HeldLock, Writer
from trireme_shared.platform.membership.own_key import may_return_s
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.platform.runtime.http import tells
from trireme_shared.protocol.errors import NotLeader, PeerError
from trireme_shared.protocol.records import Phase, PserverMember, Strategy, TrainerMember
from trireme_shared.protocol.records.setting_effects import without_effect

SWEEP_S = 1.0
PAUSE_S = 0.5
SHORTEST_WAIT_S = 0.01
PROBE_S = 0.5  # a process that is dead is refused at once
PROBE_AGAIN_S = 0.5

log = telemetry.logger("supervisor")


class Supervisor:
    """Of one term. `members_changed` after each change of `writer.job.members`. `on_late(n)`: so many tasks may be given twice."""

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
        self._known: dict[str, TrainerMember | PserverMember] = {}  # members that are there, and those that are awaited
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
        async with asyncio.TaskGroup() as group:
            group.create_task(self._reconcile_members())
            group.create_task(self._recover())
            group.create_task(self._sweep())
            group.create_task(self._rebalance())
            group.create_task(self._pauses.run())
            group.create_task(self.operations.run())
            group.create_task(self._evaluations.run())
            group.create_task(self.evictions.run())

    def members_changed(self) -> None:
        self._changed.set()
        self._pauses.look_again()
        self._evaluations.look_again()
        self.operations.look_again()

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
            self.evictions.ended.intersection_update(membership.missing(job.spec, job.trainers, job.slots, job.members))
            self._recoverable.set()

    async def _gather_joins(self) -> None:
        """Many join at once: those who come within `join_window_s` after a join make one generation. Who comes in a quiet time does
        not wait, nor does anything else: a death, a return, a rollback. A collective job begins with those who have the parameters within
        `join_window_s` after the first."""
        waited = False
        while True:
            job, now = self._writer.job, clock.monotonic()
            decision = _reconcile(job, now)
            begins = job.spec.strategy is Strategy.COLLECTIVE and begins_without_some(job.state, job.members, decision)
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
        """Leases ran out while etcd was silent: whether members may still come back. Then it has waited for news of them."""
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
        """Whether some of them do not come back: nobody listens where they did. Their keys may be gone since the launcher saw them die."""
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
        interval = min(SWEEP_S, self._writer.job.spec.task_timeout_floor_s / 4)
        while True:
            await asyncio.sleep(interval)
            await self.recovery.give_up_late()
            if found := tasks.find_late(self._writer.job, clock.monotonic()):
                self._on_late(found)
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
    return membership.reconcile(job.spec, job.state, job.trainers, job.slots, job.members, job.speeds.lane_s)


TICK_S = 1.0


class EvaluationRunner:
    """What a leader does for evaluations while the job trains: it begins each once its checkpoint is committed.

    checkpoint committed ─► begun      a later one is the latest, and the result depends on it ─► the job goes back
    trainers wait for one whose checkpoint does not come within `recovery_timeout_s`, or before that of the last version ─► left out

    Of one term. `look_again` after each change of the members or the checkpoints. `on_rollback`: the job has to go back.
    """

    def __init__(self, writer: Writer, on_rollback: Callable[[], None] = lambda: None) -> None:
        self._writer, self._on_rollback = writer, on_rollback
        self._changed = asyncio.Event()

    def look_again(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        """Until the writer's term ends (raises NotLeader) or cancelled."""
        if self._writer.job.spec.evaluate_every is None:
            return
        while True:
            if recovery.is_evaluation_lost(self._writer.job):
                if await self._writer.decide(lambda job, _: recovery.go_back_for_evaluation(job)):
                    self._writer.job.awaited = None
                    self._on_rollback()
            elif evaluation.next_due(self._writer.job) is not None:
                await self._writer.decide(lambda job, _: evaluation.begin(job))
            await self._leave_out_lost()
            await event_within(self._changed, TICK_S)
            self._changed.clear()

    async def _leave_out_lost(self) -> None:
        awaited, limit_s = self._writer.job.awaited, self._writer.job.spec.recovery_timeout_s
        if awaited is None:
            return
        if _last_is_saved(self._writer.job):
            cause = "its checkpoint was not written, and that of the last version is there"
        elif clock.monotonic() - awaited[1] > limit_s:
            cause = f"its checkpoint was not written within recovery_timeout_s {limit_s:g}"
        else:
            return

        def lost(job: Job, _now: float) -> Decision[None]:
            if job.evaluation.running is not None or evaluation.next_due(job) is not None:
                return Decision(None)
            return evaluation.leave_out(job, awaited[0], cause)

        await self._writer.decide(lost)
        self._writer.job.awaited = None


def _last_is_saved(job: Job) -> bool:
    """Whether no checkpoint of an earlier version can come any more."""
    latest = job.members.latest
    return latest is not None and latest.final and latest.timeline == job.state.timeline

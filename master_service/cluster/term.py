"""One term of a cluster's leader: its writer, its watch of the pool, the schedule, and one JobTerm for each ACTIVE job.

a job, a member or time changes ─► schedule ─► assignments, starts written ─► JobTerms begin; preempted, paused, cancelled ones stop
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from master_service.cluster.job_term import JobTerm
from master_service.cluster.takeover import ClusterTakeover
from master_service.cluster.watch import PoolWatch
from master_service.cluster.writer import MAX_BYTES, MAX_CHANGES, ClusterWriter
from master_service.core.changes import Decision, Event
from master_service.core.decisions import cluster_jobs
from master_service.core.decisions.cluster_jobs import finish, follow_resize
from master_service.core.decisions.scheduling.pool_view import lost_places
from master_service.core.decisions.scheduling.schedule import Portions, schedule
from master_service.core.state.cluster import ClusterDecision, ClusterState, Place
from master_service.core.state.job import started_by
from master_service.leadership.master import Master
from master_service.store.writer import HeldLock
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.own_key import may_return_s
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.keys import ClusterKeys
from trireme_shared.protocol.records.cluster import ClusterJob, PoolMember, Standing
from trireme_shared.protocol.times import rfc3339

LOOK_S = 5.0

log = telemetry.logger("cluster")

MakeMaster = Callable[[ClusterJob], Master]


class ClusterTerm:
    """`state` may be read at any time; jobs and assignments change only through `writer`. `make` makes the Master of a job."""

    def __init__(
        self,
        etcd: Etcd,
        keys: ClusterKeys,
        lock: HeldLock,
        start: ClusterTakeover,
        make: MakeMaster,
        on_events: Callable[[Sequence[Event]], None],
        *,
        rebalance_s: float,
    ) -> None:
        self.lock, self.lease = lock, lock.lease
        self._etcd = etcd
        self.state: ClusterState = start.state
        self.jobs: dict[str, JobTerm] = {}
        self.writer = ClusterWriter(
            etcd, keys, start.state, lock, commit_revision=start.commit_revision, on_events=on_events
        )
        self._start, self._make, self._rebalance_s = start, make, rebalance_s
        self._watch = PoolWatch(etcd, keys, self._on_member)
        self._changed = asyncio.Event()
        self._group: asyncio.TaskGroup

    def __repr__(self) -> str:
        return f"<ClusterTerm {self.lock.term}: {self.state!r}, leads {sorted(self.jobs)}>"

    async def run(self) -> None:
        """Until the lock is lost (raises LockLost in an ExceptionGroup) or cancelled."""
        self._watch.start(self._start.pool)
        try:
            async with asyncio.TaskGroup() as self._group:
                self._group.create_task(self._watch.run(self._start.revision + 1))
                self._group.create_task(self._keep_schedule())
        finally:
            self.writer.end()

    def look_again(self) -> None:
        """A job has changed."""
        self._changed.set()

    def _on_job_members(self) -> None:
        """They matter to the schedule while a place is gone: its process may be gone now, too."""
        if self.state.gone_since:
            self._changed.set()

    def _on_member(self, place: Place, member: PoolMember | None) -> None:
        self.state.see(place, member, clock.monotonic())
        self._changed.set()

    # ---------------------------------------------------------------- the schedule

    async def _keep_schedule(self) -> None:
        while True:
            self._changed.clear()
            scheduled_s = await self._create_due_jobs()
            await self._follow_resizes()
            portions = await self.writer.decide(self._plan)
            self._follow()
            while not portions.done:
                await self.writer.decide(lambda state, _: portions.next(state))  # noqa: B023  awaited before the next round
                self._follow()
            if portions.stale:
                continue
            looks = [LOOK_S, scheduled_s, portions.next_look_s]
            limit_s = max(0.01, min(look for look in looks if look is not None))
            try:
                async with asyncio.timeout(limit_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _create_due_jobs(self) -> float | None:
        """Those of schedules. Seconds until the next time of one; None: there is none."""
        while True:
            due = await self.writer.decide(lambda state, _: cluster_jobs.run_due_schedule(state, clock.wall_time()))
            if not due.again:
                return due.next_look_s

    async def _follow_resizes(self) -> None:
        """A place runs the parameter servers whose incarnations begin with its name."""
        for name, led in list(self.jobs.items()):
            leading = led.master.current_term
            if leading is None:
                continue
            held = {started_by(server) for server in leading.job.members.pservers.values()}
            live, pservers = leading.job.spec, leading.job.pservers_needed
            asked = leading.job.operations.number_of_trainers_asked()

            def follow(state: ClusterState, _: float) -> ClusterDecision[bool]:
                return follow_resize(state, name, live, pservers, held, asked=asked)  # noqa: B023  awaited before the next round

            await self.writer.decide(follow)

    def _plan(self, state: ClusterState, now: float) -> ClusterDecision[Portions]:
        """Writes the first portion."""
        lost = lost_places(state, self._present())
        planned = schedule(state, now, clock.wall_time(), self._rebalance_s, lost)
        portions = Portions(state, planned, MAX_CHANGES, MAX_BYTES)
        first = portions.next(state)
        return Decision(portions, first.changes, first.events)

    def _present(self) -> dict[str, frozenset[str]]:
        """Job -> whose processes are its members, for jobs of places that are gone. A job whose members may have lost their leases by a
        silence of etcd is left out as long as they may come back."""
        state, found = self.state, {}
        for name in {state.assignments[place].job for place in state.gone_since if place in state.assignments}:
            leading = self.jobs[name].master.current_term if name in self.jobs else None
            if leading is not None and may_return_s(self._etcd.silent_at, leading.job.spec.lease_ttl_s) <= 0:
                found[name] = leading.job.members.starters()
        return found

    def _follow(self) -> None:
        """Begin what is ACTIVE and not led yet; stop what shall stop."""
        for job in self.state.jobs.values():
            if job.standing is not Standing.ACTIVE:
                continue
            if job.job not in self.jobs:
                self.jobs[job.job] = term = JobTerm(
                    self._make(job),
                    job,
                    self.lock.lease,
                    self._finish,
                    on_resize=self.look_again,
                    on_members=self._on_job_members,
                )
                self._group.create_task(self._run_job(term))
            if job.wanted == "pause":
                self.jobs[job.job].stop(Standing.PAUSED, "paused by its user")
            elif job.wanted == "cancel":
                self.jobs[job.job].stop(Standing.CANCELLED, "cancelled by its user")
            elif job.preempted_by:
                self.jobs[job.job].stop(Standing.QUEUED, f"job {job.preempted_by} needs its members")

    async def _run_job(self, term: JobTerm) -> None:
        try:
            await term.run()
        except TriremeError:
            raise
        except Exception:  # a bug that one job meets must not end the others; it is led anew
            log.exception("job_term_failed", job=term.job)
            await asyncio.sleep(LOOK_S)
        finally:
            self.jobs.pop(term.job, None)
            self._changed.set()

    async def _finish(self, name: str, standing: Standing, reason: str) -> None:
        stamp = rfc3339(clock.wall_time())  # retention counts from it
        await self.writer.decide(lambda state, _: finish(state, name, standing, reason, stamp))
        self._changed.set()

"""One term of a cluster's leader: its schedule, and one JobTerm for each ACTIVE job. They all end with the
cluster's lock.

a job, a member or time changes ─► schedule ─► assignments, starts written
    ─► JobTerms begin; preempted, paused, cancelled ones stop

A JobTerm's Master leads the job under the cluster's lease, until the job ends or shall stop:
lead ─ COMPLETED, FAILED ─► standing written ─► its members leave ─► lock released
  └─── pause, preempted ──► checkpoint ─┐
  └─── cancel ──────────────────────────┴─► lock released ─► standing written

An error that one job, one schedule or one part of this leader meets ends no other job: what failed is tried
again, and a job that cannot be led MOST_FAILURES times in a row is FAILED, with the error.
"""

from __future__ import annotations

import asyncio
import math
import operator
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from master_service import garbage
from master_service.cluster.store import (
    LAST_BYTES,
    MAX_BYTES,
    MAX_CHANGES,
    ClusterTakeover,
    ClusterWriter,
    PoolWatch,
)
from master_service.cluster.unreadable import unreadable_event
from master_service.core.changes import Decision, Event
from master_service.core.decisions import cluster_jobs, job_operations, job_schedules
from master_service.core.decisions.cluster_jobs import finish, follow_resize
from master_service.core.decisions.job_schedules import ScheduleLook
from master_service.core.decisions.scheduling.admission import lost_places
from master_service.core.decisions.scheduling.schedule import Portions, schedule
from master_service.core.state.cluster import ClusterDecision, ClusterState, Place
from master_service.core.state.job import Job, Members, started_by
from master_service.leadership.master import Master, Term
from master_service.store.writer import TERM_OVER, HeldLock
from trireme_shared.platform.etcd import Compare, Delete, Etcd, Lease, LeaseLost
from trireme_shared.platform.membership.directory import may_return_s
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.runtime.containment import Containment, Failed, Failures, LongLivedGroup
from trireme_shared.protocol.errors import (
    CallerError,
    PeerError,
    StateUnreadable,
    TooLarge,
    TriremeError,
    leaves,
)
from trireme_shared.protocol.keys import ClusterKeys
from trireme_shared.protocol.records import JobSpec, Phase, Stage
from trireme_shared.protocol.records.cluster import ClusterJob, Outcome, PoolMember, Standing
from trireme_shared.protocol.records.operations import saves_on_demand
from trireme_shared.protocol.times import rfc3339

LOOK_S = 5.0
GATHER_S = 0.2  # a schedule begins at most so long after the last one, if there is a change that it is for
AT_ONCE = 256  # jobs that are looked at before others get their turn
JOB_LOOK_S = 5.0
PAUSE_S = 0.5
SAVE_S = 30.0  # a stop that waits longer for its checkpoint goes back to the one before
LEAVE_S = 5.0  # how long the master of a job that has ended answers its members
LONGEST_PAUSE_S = 60.0  # before a job is led anew that could not be led
MOST_FAILURES = 8

log = telemetry.logger("cluster")

MakeMaster = Callable[[ClusterJob], Master]
Finish = Callable[[str, Standing, str, Outcome | None], Awaitable[None]]


class ClusterTerm:
    """`state` may be read at any time; jobs and assignments change only through `writer`. `make` makes the
    Master of a job."""

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
        self.contained = Containment(TERM_OVER, self._tell_failure)
        self._on_events = on_events
        self._failures: dict[str, Failures] = {}  # of jobs that could not be led
        # by job: what its numbers of members follow from, as it was when they were followed last
        self._followed: dict[str, tuple[object, ...]] = {}
        self._start, self._make, self._rebalance_s = start, make, rebalance_s
        self._watch = PoolWatch(etcd, keys, self._on_member)
        self._changed = asyncio.Event()
        self._ended = garbage.EndedJobs()
        self._group: asyncio.TaskGroup

    def __repr__(self) -> str:
        return f"<ClusterTerm {self.lock.term}: {self.state!r}, leads {sorted(self.jobs)}>"

    async def run(self) -> None:
        """Until the lock is lost (raises LockLost in an ExceptionGroup) or cancelled."""
        self._watch.start(self._start.pool)
        try:
            async with LongLivedGroup() as self._group:
                following = partial(self._watch.run, self._start.revision + 1)
                self._group.create_task(self.contained.keep(following, "following the pool's members"))
                self._group.create_task(self.contained.keep(self._keep_schedule, "scheduling"))
        finally:
            self.writer.end()

    def _tell_failure(self, sentence: str) -> None:
        event = Event("leader_part_failed", sentence)
        self._on_events([event])
        self.writer.tell([event])

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
        await self.contained.once(self._end_overtaken, "ending operations of an earlier term")
        while True:
            self._changed.clear()
            begin = clock.monotonic()
            created = await self.contained.once(self._create_due_jobs, "creating the jobs of schedules")
            try:
                portions = await self.writer.decide(self._plan)
                self._follow()
                while not portions.done:
                    # awaited before the next round
                    await self.writer.decide(lambda state, _: portions.next(state))  # noqa: B023
                    self._follow()
            except TooLarge as error:
                await self._fail_alone(error)
                continue
            if await self._follow_resizes() or portions.stale:
                continue
            self._ended.after_schedule()
            scheduled_s = None if isinstance(created, Failed) else created
            looks = [LOOK_S, scheduled_s, portions.next_look_s]
            # while many members join or leave, each change would have a schedule of its own
            ended = clock.monotonic()
            took_s = min(GATHER_S, ended - begin)
            limit_s = max(0.01, min(look for look in looks if look is not None))
            try:
                async with asyncio.timeout(limit_s):
                    await self._changed.wait()
            except TimeoutError:
                continue
            if (rest_s := ended + took_s - clock.monotonic()) > 0:
                await asyncio.sleep(rest_s)

    async def _end_overtaken(self) -> None:
        stamp = clock.timestamp()
        while await self.writer.decide(lambda state, _: job_operations.overtaken(state, stamp), LAST_BYTES):
            pass

    async def _create_due_jobs(self) -> float | None:
        """Those of schedules. Seconds until the next time of one; None: there is none."""
        while True:
            try:
                due = await self.writer.decide(
                    lambda state, _: job_schedules.run_due_schedule(state, clock.wall_time())
                )
            except TooLarge as error:
                why = error.message

                def skip(state: ClusterState, _: float) -> ClusterDecision[ScheduleLook]:
                    return job_schedules.skip_due_schedule(state, clock.wall_time(), why)  # noqa: B023

                due = await self.writer.decide(skip, LAST_BYTES)  # awaited before the next round
            if not due.again:
                return due.next_look_s

    async def _fail_alone(self, error: TooLarge) -> None:
        """The job that is too large for what was decided about it ends; the others go on. Raises `error` if
        it is of no job."""
        name = error.details.get("job")
        if name not in self.state.jobs:
            raise error
        stamp = rfc3339(clock.wall_time())
        log.warning("job_too_large", job=name, cause=error.message)
        why = f"its record became too large: {error.message}"
        await self.writer.decide(lambda state, _: cluster_jobs.fail(state, name, why, stamp), LAST_BYTES)
        if name in self.jobs:
            self.jobs[name].stop(Standing.FAILED, why)

    async def _follow_resizes(self) -> bool:
        """A place runs the parameter servers whose incarnations begin with its name. Answers whether anything
        has changed."""
        changed = False
        for number, (name, led) in enumerate(list(self.jobs.items())):
            if number % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
            leading = led.master.current_term
            if leading is None:
                continue
            job, live = leading.job, leading.job.spec
            asked = job.operations.number_of_trainers_asked()
            places = self.state.revision_of(name)
            seen = (live, job.slots, job.members, asked, self.state.jobs.get(name), places)
            before = self._followed.get(name, ())
            if len(before) == len(seen) and all(map(operator.is_, before, seen)):
                continue
            held = {started_by(server) for server in job.members.pservers.values()}
            pservers = job.pservers_needed

            def follow(state: ClusterState, _: float) -> ClusterDecision[bool]:
                # awaited before the next round
                return follow_resize(state, name, live, pservers, held, asked=asked)  # noqa: B023

            deciding = partial(self._follow_resize, follow)
            followed = await self.contained.once(deciding, f"following the resize of job {name}")
            if followed is False:
                self._followed[name] = seen
            changed = changed or followed is True  # one that failed is tried with the next schedule
        return changed

    async def _follow_resize(self, follow: Callable[[ClusterState, float], ClusterDecision[bool]]) -> bool:
        if not follow(self.state, clock.monotonic()).answer:  # nothing to ask the writer for
            return False
        try:
            return await self.writer.decide(follow)
        except TooLarge as error:
            await self._fail_alone(error)
            return True

    def _plan(self, state: ClusterState, now: float) -> ClusterDecision[Portions]:
        """Writes the first portion."""
        lost = lost_places(state, self._present())
        with garbage.put_off():
            planned = schedule(state, now, clock.wall_time(), self._rebalance_s, lost)
        portions = Portions(state, planned, MAX_CHANGES, MAX_BYTES)
        first = portions.next(state)
        return Decision(portions, first.changes, first.events)

    def _present(self) -> dict[str, frozenset[str]]:
        """Job -> whose processes are its members, for jobs of places that are gone. A job whose members may
        have lost their leases by a silence of etcd is left out as long as they may come back."""
        state, found = self.state, {}
        for name in {
            state.assignments[place].job for place in state.gone_since if place in state.assignments
        }:
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
        """A bug that one job meets ends no other: it is led anew, and FAILED in the end."""
        try:
            led = await self.contained.once(term.run, f"leading job {term.job}")
            if isinstance(led, Failed):
                await self.contained.once(partial(self._not_led, term.job, led.cause), "giving a job up")
            else:
                self._failures.pop(term.job, None)
        finally:
            self.jobs.pop(term.job, None)
            self._ended.add()
            self._followed.pop(term.job, None)
            self._changed.set()

    async def _not_led(self, name: str, cause: str) -> None:
        failures = self._failures.setdefault(name, Failures())
        pause_s = failures.add(LOOK_S, LONGEST_PAUSE_S)
        if failures.count < MOST_FAILURES:
            await asyncio.sleep(pause_s)
            return
        del self._failures[name]
        reason = (
            f"its leader failed at it {failures.count} times in a row, the last time with {cause}; resume "
            "the job to try again"
        )
        await self._finish(name, Standing.FAILED, reason, None)

    async def _finish(self, name: str, standing: Standing, reason: str, outcome: Outcome | None) -> None:
        stamp = rfc3339(clock.wall_time())  # retention counts from it
        if standing is Standing.UNREADABLE:
            self.writer.tell([unreadable_event(self.state.set_aside(name, reason))])
        else:
            await self.writer.decide(
                lambda state, _: finish(state, name, standing, reason, stamp, outcome), LAST_BYTES
            )
        self._changed.set()


class JobTerm:
    """`finish(job, standing, reason, outcome)` writes where the job is now, and how far it was.
    `on_resize()`: the job has other numbers of members, or other parameter servers. `on_members()`: other
    members, or they say something else. Run `run`."""

    def __init__(
        self,
        master: Master,
        job: ClusterJob,
        lease: Lease,
        finish: Finish,
        *,
        on_resize: Callable[[], None],
        on_members: Callable[[], None],
    ) -> None:
        self.master = master
        self.job = job.job
        self._lease, self._finish = lease, finish
        self._on_resize, self._on_members = on_resize, on_members
        self._members = Members()
        self._seen: tuple[JobSpec, int, int, bool] | None = None
        self._spec = job.spec
        self._stop: tuple[Standing, str] | None = None
        self._error: TriremeError | None = None
        self._left = False

    def __repr__(self) -> str:
        return f"<JobTerm {self.job}: {self.master!r}>"

    def stop(self, standing: Standing, reason: str) -> None:
        """Leave the job: PAUSED or QUEUED with a checkpoint, CANCELLED and FAILED without. A second call
        changes nothing."""
        if self._stop is None:
            self._stop = (standing, reason)
            self.master.events.wake()

    async def run(self) -> None:
        """Until the job's standing is written and its lock is free. Raises what leading it raised, if that is
        no TriremeError: nobody leads it then."""
        leading, ending = asyncio.ensure_future(self._lead()), asyncio.ensure_future(self._until_it_ends())
        try:
            await asyncio.wait([leading, ending], return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                leading.result()
            standing, reason = await ending
            outcome = self._outcome()
            ended = standing in (Standing.COMPLETED, Standing.FAILED)
            if ended:
                await self._finish(self.job, standing, reason, outcome)
                await self._until_members_left()
        finally:
            term, self._left = self.master.current_term, True
            leading.cancel()
            ending.cancel()
            await asyncio.wait([leading, ending])
        if term is not None:
            await self._release(term.number)
        if not ended:
            await self._finish(self.job, standing, reason, outcome)

    def _outcome(self) -> Outcome | None:
        """How far the job is now; None: nobody leads it."""
        term = self.master.current_term
        if term is None:
            return None
        job, metrics = term.job, self.master.metrics
        loss = metrics.loss
        return Outcome(
            epoch=job.training.current,
            step=metrics.step,
            loss=loss if loss is not None and math.isfinite(loss) else None,
            records_done=job.records_done,
            records_total=job.records_total,
            metrics=job.newest_metrics,
            failure=job.listed_failure,
        )

    # ---------------------------------------------------------------- leading

    async def _lead(self) -> None:
        # a TaskGroup whose children fail while it is cancelled raises their errors, not CancelledError: so
        # `_left` is looked at
        while self._error is None and not self._left:
            try:
                await self.master.lead(self._lease)
            except* TriremeError as group:
                if not self._left:
                    self._note(list(leaves(group)))
            await asyncio.sleep(ids.jitter(PAUSE_S))

    def _note(self, errors: list[TriremeError]) -> None:
        """Errors of others are met again, or not, by the next attempt. One that a repetition meets again ends
        the job."""
        lasting = [
            error for error in errors if isinstance(error, CallerError) and not isinstance(error, LeaseLost)
        ]
        log.warning("job_left", job=self.job, cause="; ".join(error.message for error in errors))
        if lasting:
            self._error = lasting[0]
            self.master.events.wake()

    async def _until_it_ends(self) -> tuple[Standing, str]:
        while True:
            if self._error is not None:
                unreadable = isinstance(self._error, StateUnreadable)
                return Standing.UNREADABLE if unreadable else Standing.FAILED, self._error.message
            term = self.master.current_term
            if term is not None and term.job.state.phase.final:
                try:
                    await term.writer.settled()
                except PeerError:  # the term is over, or etcd takes no writes
                    await asyncio.sleep(PAUSE_S)
                    continue
                state = term.job.state
                done = state.phase is Phase.COMPLETED
                return (Standing.COMPLETED if done else Standing.FAILED), state.reason
            if self._stop is not None:
                standing, reason = self._stop
                if not standing.final and term is not None:
                    await self._save(term, reason)
                if self._is_final():  # it ended while it was saved
                    continue
                return standing, reason
            if term is not None and (seen := _numbers(term.job)) != self._seen:
                self._seen = seen
                self._on_resize()
            if term is not None and term.job.members is not self._members:
                self._members = term.job.members
                self._on_members()
            await self.master.events.next(JOB_LOOK_S)

    def _is_final(self) -> bool:
        term = self.master.current_term
        return term is not None and term.job.state.phase.final

    # ---------------------------------------------------------------- leaving

    async def _save(self, term: Term, cause: str) -> None:
        """A checkpoint of the present step, if the job trains and can make one."""
        state = term.job.state
        trains = state.stage is Stage.TRAIN and state.phase in {Phase.RUNNING, Phase.CHECKPOINTING}
        if not trains or not saves_on_demand(self._spec):
            return
        begin = clock.monotonic()
        try:
            asked = await term.operations.create_checkpoint("", cause, SAVE_S)
            done = await term.operations.wait(asked.operation_id, SAVE_S)
        except TriremeError as error:
            self._tell("stopped_unsaved", f"no checkpoint before the job stops: {error.message}")
            return
        took_s = round(clock.monotonic() - begin, 3)
        if done.running or done.error_code:
            self._tell(
                "stopped_unsaved", f"no checkpoint within {took_s} s before the job stops: {done.reason}"
            )

    def _tell(self, name: str, message: str) -> None:
        self.master.events.add([Event(name, message, {"job": self.job})])

    async def _until_members_left(self) -> None:
        """They see the end in etcd and leave; what they still ask is answered meanwhile."""
        deadline = clock.monotonic() + LEAVE_S
        while (term := self.master.current_term) is not None and clock.monotonic() < deadline:
            if not term.job.members.trainers and not term.job.members.pservers:
                return
            await asyncio.sleep(PAUSE_S / 5)

    async def _release(self, term: int) -> None:
        """The job's lock and address go, so that the next leader of it need not wait. Best effort: they go
        with the lease, too."""
        keys = self.master.keys
        held = Compare.create(keys.master_lock, "==", term)
        try:
            await self.master.etcd.txn([held], [Delete(keys.master_lock), Delete(keys.master_address)])
        except PeerError as error:
            log.warning("lock_not_released", job=self.job, cause=error.message)


def _numbers(job: Job) -> tuple[JobSpec, int, int, bool]:
    """What the numbers of members of a job in its cluster follow from."""
    return job.spec, job.pservers_needed, len(job.members.pservers), job.operations.number_of_trainers_asked()

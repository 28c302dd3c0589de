"""`schedule`: what the leader of a cluster has to write now, and when it has to look again. `Portions`: it is
written piece by piece.

Promises: a place works for one job at a time; no job has less than its minimum while another has more, unless
that one holds it and comes first; what was decided once is not decided differently on the state that it leads
to. O((jobs + members) log members).
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

from master_service.core.changes import Decision, Event
from master_service.core.decisions.scheduling.admission import (
    KINDS,
    Admission,
    Claim,
    IdlePlaces,
    PoolView,
    admit,
    hosts_of,
    look,
    named,
    readiness,
    shares,
    unfit_counts,
)
from master_service.core.decisions.scheduling.job_tasks import TaskTurn, take_turn
from master_service.core.state.cluster import (
    ClusterChange,
    ClusterDecision,
    ClusterState,
    DropAssignment,
    Place,
    PutAssignment,
    PutJob,
    PutTaskRun,
)
from trireme_shared.protocol.records.cluster import (
    Assignment,
    ClusterJob,
    Kind,
    Standing,
    TaskState,
    in_words,
)
from trireme_shared.protocol.times import rfc3339


@dataclass(frozen=True, slots=True)
class Schedule:
    """`changes`: in an order in which they may be written one after the other. `told`: for each of them, the
    events to tell once it is written. `next_look_s`: when time alone may change the outcome."""

    changes: tuple[ClusterChange, ...] = ()
    told: tuple[tuple[Event, ...], ...] = ()
    next_look_s: float | None = None

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(event for told in self.told for event in told)


def schedule(
    state: ClusterState, now: float, wall_time: float, rebalance_s: float = 30.0, lost: Collection[Place] = ()
) -> Schedule:
    """`now`: monotonic, s; `wall_time`: seconds since 1970; `rebalance_s`: a place that moved less than so
    long ago is not taken from a job for fairness alone, unless a job starts or ends; `lost`: see
    `lost_places`."""
    return _Making(state, now, wall_time, rebalance_s, lost).run()


@dataclass
class _Making:
    """One schedule while it is made. `jobs`: those that change. `gives`: places for jobs, of each kind.
    `events`: by the job or the place that they are about. `short`: ACTIVE jobs below their minimum; of
    thousands they are few, and the others need not be seen one by one."""

    state: ClusterState
    now: float
    wall_time: float
    rebalance_s: float
    lost: Collection[Place]
    view: PoolView = field(init=False)
    jobs: dict[str, ClusterJob] = field(default_factory=dict)
    gives: dict[Kind, Counter[str]] = field(default_factory=lambda: {kind: Counter() for kind in KINDS})
    puts: dict[Place, Assignment] = field(default_factory=dict)
    events: dict[str | Place, list[Event]] = field(default_factory=dict)
    tasks: TaskTurn = field(default_factory=TaskTurn)
    short: set[str] = field(default_factory=set)
    left: int = 0  # idle trainers that no minimum needs; counted by _give_minimum

    def __post_init__(self) -> None:
        self.view = look(self.state, self.now, self.lost)
        self.unfit = unfit_counts(self.state)

    def run(self) -> Schedule:
        turn = readiness(self.state.jobs, self.wall_time)
        if turn.next_look_s is not None:
            self.view.look_again(turn.next_look_s)
        for name, why in turn.cancelled.items():
            self._cancel(self.state.jobs[name], why)
        tasks = self.tasks = take_turn(self.state, self.view, turn.ready, self.now, self.wall_time)
        for name, why in tasks.failed.items():
            self._fail(self.state.jobs[name], why)
        stays = [
            job for job in self.state.jobs.values() if job.standing is Standing.ACTIVE and not job.leaving
        ]
        self.short = {job.job for job in stays if self._short(job)}
        admission = admit([*stays, *tasks.ready], self.view.usable, self.short)
        self._preempt(admission)
        targets = self._targets(admission.running, admission.starting)
        urgent = self.view.job_ended or bool(self.short) or bool(admission.starting or self.view.held_back)
        self._release(admission.running, targets, urgent=urgent)
        started = self._give_minimum(admission)
        if started:
            admission.starting = [job for job in admission.starting if job.job not in self.jobs]
            admission.running = sorted([*admission.running, *started], key=attrgetter("turn"))
            targets = self._targets(admission.running, admission.starting)
            self._release(admission.running, targets, urgent=True)
        self._give_above_minimum(admission.running, targets)
        self._place(admission.running)
        for name, why in (turn.waiting | tasks.waiting).items():
            self._explain(self.state.jobs[name], why)
        self._explain_all(admission)
        return self._written()

    # -------------------------------------------------------------- jobs

    def _cancel(self, job: ClusterJob, why: str) -> None:
        end = rfc3339(self.wall_time)
        self.jobs[job.job] = job.with_fields(standing=Standing.CANCELLED, reason=why, end_time=end)
        self._say("job_cancelled", f"job {job.job} is CANCELLED: {why}", job)

    def _fail(self, job: ClusterJob, why: str) -> None:
        end = rfc3339(self.wall_time)
        self.jobs[job.job] = job.with_fields(standing=Standing.FAILED, reason=why, end_time=end)
        self._say("job_failed", f"job {job.job} is FAILED: {why}", job)

    def _preempt(self, admission: Admission) -> None:
        for name, claimant in admission.preempted.items():
            job, first = self.state.jobs[name], self.state.jobs[claimant]
            why = (
                f"gives its members to job {claimant} of priority {first.scheduling.priority}; "
                f"its own is {job.scheduling.priority}"
            )
            self.jobs[name] = job.with_fields(preempted_by=claimant, reason=why)
            self._say("job_preempted", f"job {name} {why}", job)

    def _start(self, job: ClusterJob) -> ClusterJob:
        started = job.with_fields(
            standing=Standing.ACTIVE,
            epoch=job.epoch + 1,
            start_time=rfc3339(self.wall_time),
            reason="",
            preempted_by="",
        )
        self.jobs[job.job] = started
        return started

    def _explain(self, job: ClusterJob, why: str) -> None:
        job = self.jobs.get(job.job, job)
        if job.reason != why:
            self.jobs[job.job] = job.with_fields(reason=why)

    def _explain_all(self, admission: Admission) -> None:
        for job, why in reasons_of_waiting(self.view, admission):
            self._explain(job, why)
        for job in admission.starting:
            self._explain(job, reason_of_starting(job, self.view))
        for job in admission.running:
            if job.job in self.short or job.job in self.jobs or job.reason.startswith(LACKS):
                self._explain(job, reason_of_short(job, self.view))

    # -------------------------------------------------------------- how many

    def _short(self, job: ClusterJob) -> bool:
        return any(len(self.view.holds(kind, job.job)) < job.needs[kind] for kind in KINDS)

    def _targets(self, running: list[ClusterJob], starting: list[ClusterJob]) -> dict[str, int]:
        """A job that has not started yet claims its least number only: nobody gives up more before it can be
        used."""
        claims = []
        held, unfit = self.view.held["trainer"], self.unfit["trainer"]
        there = self.view.usable["trainer"] + self.view.held_back
        for job in (*running, *starting):
            runs = job.standing is Standing.ACTIVE
            fit = there - (unfit[job.job] if runs else 0)
            least = min(job.least_trainers, fit)
            claims.append(
                Claim(
                    job=job.job,
                    least=least,
                    most=max(least, min(job.most_trainers, fit)) if runs else least,
                    priority=job.scheduling.priority,
                    weight=job.scheduling.weight,
                    held=len(held.get(job.job, ())),
                    number=job.number,
                )
            )
        return shares(claims, self.view.usable["trainer"])

    def _give_minimum(self, admission: Admission) -> list[ClusterJob]:
        """Idle places for ACTIVE jobs below their minimum and for jobs that start. Those that cannot start
        yet have what is idle kept for them. Answers the started ones."""
        left = {kind: len(self.view.idle[kind]) for kind in KINDS}
        started = []
        short = [job for job in admission.running if job.job in self.short]
        for job in sorted([*short, *admission.starting], key=attrgetter("turn")):
            needs = job.needs
            starts = job.standing is not Standing.ACTIVE
            if starts and all(needs[kind] <= left[kind] for kind in KINDS):
                started.append(self._start(job))
            for kind in KINDS:
                lacks = needs[kind] - len(self.view.holds(kind, job.job))
                count = max(0, min(lacks, left[kind]))
                left[kind] -= count
                if not starts or job.job in self.jobs:
                    self.gives[kind][job.job] += count
        self.left = left["trainer"]
        return started

    def _give_above_minimum(self, running: list[ClusterJob], targets: dict[str, int]) -> None:
        """The higher priority first, then who has least for its weight."""

        def turn(job: ClusterJob) -> tuple[int, float, int, str]:
            has = len(self.view.holds("trainer", job.job)) + self.gives["trainer"][job.job]
            return -job.scheduling.priority, has / job.scheduling.weight, job.number, job.job

        def lacks(job: ClusterJob) -> bool:
            has = len(self.view.holds("trainer", job.job)) + self.gives["trainer"][job.job]
            return has < targets[job.job]

        jobs = {job.job: job for job in running}
        heap = [turn(job) for job in running if lacks(job)]
        heapq.heapify(heap)
        while heap and self.left > 0:
            job = jobs[heapq.heappop(heap)[-1]]
            self.gives["trainer"][job.job] += 1
            self.left -= 1
            if lacks(job):
                heapq.heappush(heap, turn(job))

    # -------------------------------------------------------------- which

    def _release(self, running: list[ClusterJob], targets: dict[str, int], *, urgent: bool) -> None:
        """Trainers above a job's share leave it. Parameter servers hold parameters: they never do."""
        for job in running:
            held = self.view.holds("trainer", job.job)
            surplus = len(held) - targets[job.job]
            if surplus <= 0:
                continue
            useless = len(held) - job.most_trainers
            gone: set[Place] = set()
            for place in self._first_to_leave(held):
                if len(gone) == surplus:
                    break
                left_s = self.state.moved.get(place, -float("inf")) + self.rebalance_s - self.now
                if urgent or len(gone) < useless or left_s <= 0:
                    why = (
                        "it is not needed"
                        if len(gone) < useless
                        else "other jobs have fewer than their share"
                    )
                    self._unassign(place, why)
                    gone.add(place)
                else:
                    self.view.look_again(left_s)
            held[:] = [place for place in held if place not in gone]

    def _first_to_leave(self, held: list[Place]) -> list[Place]:
        """Those with a fresh process, then those that are few on their host, then those that came last.
        Members that are gone cannot work for another job."""
        hosts = Counter(hosts_of(self.state, held))

        def key(place: Place) -> tuple[bool, int, float, Place]:
            few = hosts[self.state.members[place].host]
            return place not in self.view.renewed, few, -self.state.moved.get(place, -float("inf")), place

        return sorted((place for place in held if place not in self.view.gone), key=key)

    def _unassign(self, place: Place, why: str) -> None:
        self.view.drops[place] = why
        self.view.renewed.discard(place)
        member = self.state.members[place]
        if member.running:
            self.view.ending[place[0]][member.running] += 1
        else:
            self.view.idle[place[0]].append(place)
            self.left += 1

    def _place(self, running: list[ClusterJob]) -> None:
        for kind in KINDS:
            jobs = [job for job in running if self.gives[kind][job.job] > 0]
            if not jobs:
                continue
            idle = IdlePlaces(self.view.idle[kind], self.state.members)
            for job in jobs:
                held = self.view.held[kind].setdefault(job.job, [])
                hosts = Counter(hosts_of(self.state, held))
                take = idle.take_spread if kind == "pserver" else idle.take_together
                places = take(self.gives[kind][job.job], partial(self.state.fits, job=job), hosts)
                held += places
                for place in places:
                    self._assign(place, job)
                self._replace_lost(job, places)
            self.view.idle[kind] = [place for place in self.view.idle[kind] if place not in self.puts]

    def _replace_lost(self, job: ClusterJob, places: list[Place]) -> None:
        """Each new place of a job is instead of a lost one. A lost place that nobody replaces stays assigned
        for its grace: its process goes on if its host comes back meanwhile."""
        for place in places:
            if lost := self.view.lost[place[0]].get(job.job):
                self.view.drops[lost.pop(0)] = f"it is lost with its process; {place[1]} replaces it"

    def _assign(self, place: Place, job: ClusterJob) -> None:
        self.puts[place] = Assignment(
            job=job.job,
            epoch=job.epoch,
            incarnation=self.state.members[place].incarnation,
            assign_time=rfc3339(self.wall_time),
        )

    # -------------------------------------------------------------- written

    def _written(self) -> Schedule:
        for place in sorted(self.view.renewed):
            self._assign(place, self.state.jobs[self.state.assignments[place].job])
        for job in self.jobs.values():
            if job.standing is Standing.ACTIVE and job.epoch != self.state.jobs[job.job].epoch:
                held = [(kind, len(self.view.holds(kind, job.job))) for kind in KINDS]
                counts = " and ".join(in_words(kind, count) for kind, count in held if count)
                self._say("job_started", f"job {job.job} starts with {counts}", job)
        for place, why in self.view.drops.items():
            was = self.state.assignments[place].job
            message = f"{place[0]} {place[1]} leaves job {was}: {why}"
            self._tell(place, Event("member_unassigned", message, {"member": place[1], "job": was}))
        changes: dict[str | Place, ClusterChange] = dict(
            self.tasks.changes
        )  # first: what their members report is recorded
        for about, events in self.tasks.events.items():
            self.events.setdefault(about, []).extend(events)
        given = self.puts.keys() | changes.keys()
        changes |= {place: DropAssignment(place) for place in sorted(self.view.drops.keys() - given)}
        changes |= {name: PutJob(job) for name, job in sorted(self.jobs.items())}
        changes |= {
            place: PutAssignment(place, held)
            for place, held in sorted(self.puts.items(), key=lambda item: item[0])
        }
        told = tuple(tuple(self.events.get(about, ())) for about in changes)
        return Schedule(tuple(changes.values()), told, self.view.next_look_s)

    def _say(self, name: str, message: str, job: ClusterJob) -> None:
        self._tell(job.job, Event(name, message, {"job": job.job}))

    def _tell(self, about: str | Place, event: Event) -> None:
        self.events.setdefault(about, []).append(event)


class Portions:
    """A schedule in portions, one for each transaction, each with the events of its changes.

    schedule ──next──► written ──next──► written ─► …
    what a change is about has changed in between ─► stale: schedule anew

    They are what is left to write of a schedule that was just made of `state`. A transaction takes at most
    `most` changes and `most_bytes` of values. `stale`: the rest must not be written.
    """

    def __init__(self, state: ClusterState, planned: Schedule, most: int, most_bytes: int) -> None:
        self.next_look_s, self.stale = planned.next_look_s, False
        self._most, self._most_bytes = most, most_bytes
        self._left = deque(zip(planned.changes, planned.told, strict=True))
        self._jobs, self._members = dict(state.jobs), dict(state.members)
        self._assignments, self._drains = dict(state.assignments), dict(state.drains)
        self._runs = {(job, name): run for job, runs in state.task_runs.items() for name, run in runs.items()}

    def __repr__(self) -> str:
        return f"<Portions: {len(self._left)} changes left{', stale' if self.stale else ''}>"

    @property
    def done(self) -> bool:
        """Whether there is nothing more to write."""
        return self.stale or not self._left

    def next(self, state: ClusterState) -> ClusterDecision[None]:
        """The next portion. None of it if anything in it is about what has changed since the schedule was
        made."""
        changes: list[ClusterChange] = []
        events: list[Event] = []
        size = 0
        while self._left and (len(changes) < self._most or _goes_on(changes)):
            change, told = self._left[0]
            size += _size(change)
            if changes and size > self._most_bytes and not _goes_on(changes):
                break
            if not self._is_as_planned(change, state):
                self.stale = True
                return Decision(None)
            self._left.popleft()
            changes.append(change)
            events += told
        for change in changes:
            if isinstance(change, PutJob):
                self._jobs[change.job.job] = change.job
            elif isinstance(change, PutTaskRun):
                self._runs[change.run.job, change.run.name] = change.run
        return Decision(None, tuple(changes), tuple(events))

    def _is_as_planned(self, change: ClusterChange, state: ClusterState) -> bool:
        match change:
            case PutJob(job):
                return state.jobs.get(job.job) == self._jobs.get(job.job)
            case PutAssignment(place, assignment):
                same = state.jobs.get(assignment.job) == self._jobs.get(assignment.job)
                return same and self._place_is(place, state)
            case DropAssignment(place):
                return self._place_is(place, state)
            case PutTaskRun(run):
                same = state.task_runs.get(run.job, {}).get(run.name) == self._runs.get((run.job, run.name))
                return same and state.jobs.get(run.job) == self._jobs.get(run.job)
            case _:
                return False

    def _place_is(self, place: Place, state: ClusterState) -> bool:
        """Whether member, assignment and drain of the place are as they were."""
        return all(
            now.get(place) == before.get(place)
            for now, before in (
                (state.members, self._members),
                (state.assignments, self._assignments),
                (state.drains, self._drains),
            )
        )


def _goes_on(changes: list[ClusterChange]) -> bool:
    """Whether the next change belongs to the last one: a task's start and the assignment of its member."""
    last = changes[-1] if changes else None
    return isinstance(last, PutTaskRun) and last.run.state is TaskState.RUNNING


def _size(change: ClusterChange) -> int:
    match change:
        case PutJob(job):
            return len(job.to_bytes())
        case PutAssignment(_, assignment):
            return len(assignment.to_bytes())
        case PutTaskRun(run):
            return len(run.to_bytes())
        case _:
            return 0


# ------------------------------------------------------ why a job is where it is: sentences with both numbers

NUMBERED = (
    # of the jobs that wait, so many have numbers in their reason: these change often, and each change is
    # written
    20
)
LACKS = "lacks "
HOLDERS = 4  # that a sentence names


def reasons_of_waiting(view: PoolView, admission: Admission) -> Iterator[tuple[ClusterJob, str]]:
    """Jobs that cannot start before others end, or members join."""
    others = [job.job for job in (*admission.running, *admission.starting)]
    first: ClusterJob | None = None  # that waits for members which the pool has
    for number, job in enumerate(admission.waiting):
        if too_many := [kind for kind in KINDS if job.needs[kind] > view.usable[kind]]:
            kind = too_many[0]
            yield (
                job,
                (
                    f"needs {in_words(kind, job.needs[kind])}; the pool has {view.usable[kind]}: more "
                    "must join it"
                ),
            )
        elif number >= NUMBERED:
            yield job, f"waits behind more than {NUMBERED} jobs that come first"
        else:
            yield job, _lacks(job, view, admission, others) or _behind(job, first, view, admission)
            first = first or job


def reason_of_starting(job: ClusterJob, view: PoolView) -> str:
    """The pool has enough for it, but some still work for others."""
    lacking = [kind for kind in KINDS if len(view.idle[kind]) < job.needs[kind]]
    kind = lacking[0] if lacking else KINDS[-1]
    ending = sorted(view.ending[kind])
    by = f"; processes of {named(ending)} end" if ending else ""
    return (
        f"waits for {in_words(kind, job.needs[kind])}; {len(view.idle[kind])} of {view.usable[kind]} "
        f"can be had at once{by}"
    )


def reason_of_short(job: ClusterJob, view: PoolView) -> str:
    """An ACTIVE job has less than its minimum. Empty: it has it."""
    for kind in KINDS:
        lacks = job.needs[kind] - len(view.holds(kind, job.job))
        if lacks > 0:
            idle = len(view.idle[kind])
            of = f"{idle} of {view.usable[kind]} in the pool {'is' if idle == 1 else 'are'} idle"
            return f"{LACKS}{lacks} of {in_words(kind, job.needs[kind])}; {of}"
    return ""


def who_has(state: ClusterState, name: str, kind: Kind) -> str:
    """Why a job has fewer members than it could use: how many the pool has, and which jobs have them. Empty:
    it has all places that it may have; then their processes are starting."""
    job = state.jobs.get(name)
    if job is None:
        return ""
    wants = job.most_trainers if kind == "trainer" else job.pservers_wanted
    if len(state.assigned_to(name, kind)) >= wants:
        return ""
    there = [place for place in state.members if place[0] == kind]
    drained = sum(place in state.drains for place in there)
    of = f", {drained} of them drained" if drained else ""
    missing = ": more must join it" if len(there) - drained < wants else ""
    pool = f"the pool has {in_words(kind, len(there))}{of}{missing}"
    held = Counter(
        held.job for place, held in state.assignments.items() if place[0] == kind and held.job != name
    )
    others = sorted((state.jobs[other] for other in held if other in state.jobs), key=attrgetter("turn"))
    mine = job.scheduling.priority
    parts = [f"job {each.job} of {_priority(each, mine)} has {held[each.job]}" for each in others[:HOLDERS]]
    more = (
        [f"other jobs have {sum(held[each.job] for each in others[HOLDERS:])}"]
        if len(others) > HOLDERS
        else []
    )
    return "; ".join([pool, *parts, *more])


def _priority(job: ClusterJob, mine: int) -> str:
    level = job.scheduling.priority
    if level == mine:
        return "the same priority"
    return f"a {'higher' if level > mine else 'lower'} priority ({level}, here {mine})"


def _lacks(job: ClusterJob, view: PoolView, admission: Admission, others: list[str]) -> str:
    for kind in KINDS:
        needs, free, there = job.needs[kind], max(0, admission.left[kind]), view.usable[kind]
        if needs > free:
            have = f"{named(others)} {'has' if len(others) == 1 else 'have'} the others"
            words = f"{free} of {there} {'is' if free == 1 else 'are'} free"
            if kind == "trainer":
                words = f"{free} of {there} can be had"
                have = f"{named(others)} {'keeps' if len(others) == 1 else 'keep'} the others as the minimum"
            return f"waits for {in_words(kind, needs)}; {words} ({have})"
    return ""


def _behind(job: ClusterJob, first: ClusterJob | None, view: PoolView, admission: Admission) -> str:
    ahead = f"job {first.job}" if first else "another job"
    kind: Kind = "pserver"
    if not job.needs["pserver"] or (first and first.needs["pserver"] <= max(0, admission.left["pserver"])):
        kind = "trainer"
    free = max(0, admission.left[kind])
    wants = (
        f"which comes first and waits for {in_words(kind, first.needs[kind])}"
        if first
        else "which comes first"
    )
    return (
        f"waits for {in_words(kind, job.needs[kind])} behind {ahead}, {wants}; {free} of "
        f"{view.usable[kind]} can be had"
    )

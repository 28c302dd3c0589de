"""Who runs: which QUEUED jobs may start at all (`readiness`), which of them have what they need (`admit`),
how many trainers each gets (`shares`).

Each job needs its parameter servers and its least number of trainers at once (gang), or it waits. Jobs are
asked in the order of priority, then of submission. A job that does not fit holds back later ones, which would
otherwise take one by one what it waits for; trainers above a minimum work for running jobs meanwhile. A
preemptible job of a lower priority is not held back, because it can be taken away again, unless another of
its own priority waits.

PoolView is the pool as one schedule sees it: who holds which place, what is idle, what will be idle soon.
IdlePlaces chooses the idle members that a job gets.

valid assignment     the job is ACTIVE in that epoch ──► held         else ──► dropped
no assignment        the member runs nothing ──► idle                 its old process still runs ──► ending

valid assignment, no member:
    its process is a member of the job still, or nobody knows
        ──► held, gone: for GONE_GRACE_S, then dropped
    its process has lost its key in the job, too
        ──► lost: as long, or until another place replaces it
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from master_service.core.state.cluster import (
    ClusterState,
    Place,
    is_task_wanted,
    reports_end,
    unfinished_tasks,
)
from trireme_shared.protocol.records.cluster import (
    Assignment,
    ClusterJob,
    Kind,
    PoolMember,
    Standing,
    TaskState,
    spoken,
)
from trireme_shared.protocol.times import instant

# a member that vanished may come back with its process: its lease ran out, or etcd was silent
GONE_GRACE_S = 10.0
KINDS: tuple[Kind, Kind] = ("pserver", "trainer")
WAITED_FOR = {Standing.QUEUED, Standing.ACTIVE, Standing.PAUSED, Standing.UNREADABLE}


@dataclass
class PoolView:
    """`held`: places of ACTIVE jobs, `gone` ones too. `gone`: held, but there is no member; it may come back.
    `lost`: assigned, but neither the member nor its process is there: the job has to do without it.
    `renewed`: held, but the member registered anew since. `idle`: may be assigned now. `ending`: kind -> job
    whose old process still runs -> how many places will be idle after it. `usable`: all of these, those held
    by jobs that end or leave too. `drops`: assignments that are no more. `tasked`: run a pre- or post-task of
    a job, and are not `usable`. `reported`: whose member says how the task ended. `held_back`: so many
    trainers less are `usable` than there are, for such tasks. `next_look_s`: when a grace is over."""

    held: dict[Kind, dict[str, list[Place]]]
    idle: dict[Kind, list[Place]]
    ending: dict[Kind, Counter[str]]
    usable: dict[Kind, int]
    gone: set[Place] = field(default_factory=set)
    lost: dict[Kind, dict[str, list[Place]]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    renewed: set[Place] = field(default_factory=set)
    drops: dict[Place, str] = field(default_factory=dict)
    tasked: dict[Place, Assignment] = field(default_factory=dict)
    reported: set[Place] = field(default_factory=set)
    held_back: int = 0
    job_ended: bool = False
    next_look_s: float | None = None

    def holds(self, kind: Kind, job: str) -> list[Place]:
        return self.held[kind].get(job, [])

    def look_again(self, after_s: float) -> None:
        self.next_look_s = after_s if self.next_look_s is None else min(self.next_look_s, after_s)


def lost_places(state: ClusterState, present: Mapping[str, Collection[str]]) -> frozenset[Place]:
    """Assigned places whose member is gone and whose process is no member of the job any more: both leases
    have ended. `present`: for each job whose members are known, the names of the pool's members that have a
    process among them."""
    held = [(place, state.assignments[place].job) for place in state.gone_since if place in state.assignments]
    return frozenset(place for place, job in held if job in present and place[1] not in present[job])


def look(state: ClusterState, now: float, lost: Collection[Place]) -> PoolView:
    view = PoolView(
        held={kind: {} for kind in KINDS},
        idle={kind: [] for kind in KINDS},
        ending={kind: Counter() for kind in KINDS},
        usable=dict.fromkeys(KINDS, 0),
    )
    settled = set()
    for name, job in state.jobs.items():
        if (there := state.settled(job)) is not None:
            settled.add(name)
            for kind, places in there.items():
                view.usable[kind] += len(places)
                if places:
                    view.held[kind][name] = list(places)
    others = state.assigned_to_others(settled)
    for place in others:
        _look_at_assignment(view, state, place, state.assignments[place], now, lost)
    for name in {state.assignments[place].job for place in others}:
        _settle(view, state, name)
    free = state.members.keys() - state.assignments.keys()
    for place in sorted(free.union(place for place in others if place in state.members)):
        if state.takes_work(place) and place not in view.tasked:
            view.usable[place[0]] += 1
            _look_at_member(view, state, place, state.members[place])
    return view


def unfit_counts(state: ClusterState) -> dict[Kind, Counter[str]]:
    """How many members of a kind are of no use for an ACTIVE job's epoch, by job."""
    counts: dict[Kind, Counter[str]] = {kind: Counter() for kind in KINDS}
    for place, starts in state.unfit.items():
        if not state.takes_work(place):
            continue
        for job in {name for name, _ in starts} & state.jobs.keys():
            counts[place[0]][job] += not state.fits(place, state.jobs[job])
    return counts


def _settle(view: PoolView, state: ClusterState, name: str) -> None:
    """If nothing is to be noted of any place that trains the job, the next look need not see them one by
    one."""
    job, there = state.jobs.get(name), {kind: tuple(view.holds(kind, name)) for kind in KINDS}
    noted = any(place in view.gone or place in view.renewed for places in there.values() for place in places)
    all_held = all(len(there[kind]) == len(state.assigned_to(name, kind)) for kind in KINDS)
    if job is not None and all_held and not noted:
        state.settle(job, there)


def _look_at_assignment(
    view: PoolView, state: ClusterState, place: Place, held: Assignment, now: float, lost: Collection[Place]
) -> None:
    job, member = state.jobs.get(held.job), state.members.get(place)
    if held.task:
        _look_at_task(view, state, place, held, now)
    elif job is None or job.standing is not Standing.ACTIVE or job.epoch != held.epoch:
        view.drops[place] = f"job {held.job} is {job.standing if job else 'deleted'}"
        view.job_ended = True
    elif member is None:
        left_s = state.gone_since.get(place, now) + GONE_GRACE_S - now
        if left_s <= 0:
            view.drops[place] = f"it is gone for {GONE_GRACE_S:g} s"
            return
        view.look_again(left_s)
        if place in lost:
            view.lost[place[0]].setdefault(held.job, []).append(place)
            return
        view.gone.add(place)
        view.usable[place[0]] += 1
        view.held[place[0]].setdefault(held.job, []).append(place)
    elif (why := _useless(state, place, member, job)) is not None:
        view.drops[place] = why
    else:
        if held.incarnation not in ("", member.incarnation):
            view.renewed.add(place)
        view.held[place[0]].setdefault(held.job, []).append(place)


def _look_at_task(view: PoolView, state: ClusterState, place: Place, held: Assignment, now: float) -> None:
    job, member = state.jobs.get(held.job), state.members.get(place)
    run = state.task_runs.get(held.job, {}).get(held.task)
    left_s = state.gone_since.get(place, now) + GONE_GRACE_S - now
    if member is not None and reports_end(member, held):
        view.reported.add(place)
    current = run is not None and run.state is TaskState.RUNNING and run.attempt == held.attempt
    if job is None or not current or not is_task_wanted(job, held.task):
        view.drops[place] = f"its {spoken(held.task)} is over"
    elif member is None and left_s <= 0:
        view.drops[place] = f"it is gone for {GONE_GRACE_S:g} s"
    elif member is None:
        view.look_again(left_s)
        view.tasked[place] = held
    elif not state.takes_work(place) or held.incarnation != member.incarnation:
        view.drops[place] = "it is drained, leaves the pool or has registered anew"
    elif place in view.reported:
        view.drops[place] = f"its {spoken(held.task)} has ended"
    else:
        view.tasked[place] = held


def _look_at_member(view: PoolView, state: ClusterState, place: Place, member: PoolMember) -> None:
    if place in state.assignments and place not in view.drops:
        return
    if member.running:
        view.ending[place[0]][member.running] += 1
    else:
        view.idle[place[0]].append(place)


def _useless(state: ClusterState, place: Place, member: PoolMember, job: ClusterJob) -> str | None:
    """Why a member that is there cannot go on with the job, else None."""
    if member.draining:
        return "it is about to leave the pool"
    if place in state.drains:
        return "it is drained"
    if not state.fits(place, job):
        return f"its process does not run: {member.trouble}" if member.trouble else "its process has ended"
    return None


def hosts_of(state: ClusterState, places: list[Place]) -> Iterator[str]:
    """The hosts of those places that have a member."""
    return (state.members[place].host for place in places if place in state.members)


Fits = Callable[[Place], bool]


class IdlePlaces:
    """Idle members of one kind, by host: a job gets its trainers together on few hosts, its parameter servers
    on many. Hosts are found by how many they have, in O(log hosts)."""

    def __init__(self, places: Iterable[Place], members: Mapping[Place, PoolMember]) -> None:
        self._hosts: dict[str, list[Place]] = defaultdict(list)
        for place in sorted(places, reverse=True):
            self._hosts[members[place].host].append(place)  # taken from the end: the first by name first
        self._aside: set[str] = set()
        # heaps; an entry counts if the host still has so many
        self._by_count: dict[int, list[str]] = defaultdict(list)
        for host, there in self._hosts.items():
            self._by_count[len(there)].append(host)
        for hosts in self._by_count.values():
            heapq.heapify(hosts)

    def take_together(self, count: int, fits: Fits, hosts: Counter[str]) -> list[Place]:
        """At most `count`. `hosts`: how many the job has where: there first; then the host that has just
        enough, or most."""
        taken: list[Place] = []
        for host, _ in sorted(hosts.items(), key=lambda item: (-item[1], item[0])):
            taken += self._take(host, count - len(taken), fits)
        refused: list[str] = []
        while len(taken) < count and (host := self._best(count - len(taken))):
            found = self._take(host, count - len(taken), fits)
            taken += found
            if not found:
                refused.append(self._set_aside(host))
        self._put_back(refused)
        return taken

    def take_spread(self, count: int, fits: Fits, hosts: Counter[str]) -> list[Place]:
        """At most `count`. `hosts`: how many the job has where: others first, those that have most idle
        ones."""
        taken: list[Place] = []
        hosts, aside = Counter(hosts), []
        while len(taken) < count and (host := self._largest()):
            found = self._take(host, 1, fits) if host not in hosts else []
            taken += found
            hosts.update([host] if found else [])
            if self._hosts[host]:
                aside.append(self._set_aside(host))
        while len(taken) < count and aside:
            host = min(aside, key=lambda name: (hosts[name], -len(self._hosts[name]), name))
            found = self._take(host, 1, fits)
            taken += found
            hosts.update([host] if found else [])
            if not found or not self._hosts[host]:
                aside.remove(host)
                self._put_back([host])
        self._put_back(aside)
        return taken

    def _take(self, host: str, most: int, fits: Fits) -> list[Place]:
        there = self._hosts.get(host, [])
        taken: list[Place] = []
        for place in reversed(there):
            if len(taken) >= most:
                break
            if fits(place):
                taken.append(place)
        for place in taken:
            there.remove(place)
        if taken and there:
            heapq.heappush(self._by_count[len(there)], host)
        return taken

    def _first(self, count: int) -> str:
        """The first host by name that has exactly `count`; empty: there is none."""
        hosts = self._by_count[count]
        while hosts and (len(self._hosts[hosts[0]]) != count or hosts[0] in self._aside):
            heapq.heappop(hosts)
        if not hosts:
            del self._by_count[count]
        return hosts[0] if hosts else ""

    def _best(self, count: int) -> str:
        counts = sorted(self._by_count)
        for there in [*(n for n in counts if n >= count), *(n for n in reversed(counts) if n < count)]:
            if host := self._first(there):
                return host
        return ""

    def _largest(self) -> str:
        return next(
            (host for there in sorted(self._by_count, reverse=True) if (host := self._first(there))), ""
        )

    def _set_aside(self, host: str) -> str:
        """It is not found any more until it is put back."""
        self._aside.add(host)
        return host

    def _put_back(self, hosts: list[str]) -> None:
        for host in hosts:
            self._aside.discard(host)
            if self._hosts[host]:
                heapq.heappush(self._by_count[len(self._hosts[host])], host)


@dataclass
class Readiness:
    """`waiting`, `cancelled`: job -> reason. `next_look_s`: until the next time is reached, seconds."""

    ready: list[ClusterJob] = field(default_factory=list)
    waiting: dict[str, str] = field(default_factory=dict)
    cancelled: dict[str, str] = field(default_factory=dict)
    next_look_s: float | None = None


def readiness(jobs: Mapping[str, ClusterJob], wall_time: float) -> Readiness:
    """The QUEUED jobs whose time has come, and before which all jobs are COMPLETED. A job that was ACTIVE
    once (it was paused or preempted) does not wait for `after` again. `wall_time`: seconds since 1970."""
    found = Readiness(cancelled=_without_hope(jobs))
    for job in jobs.values():
        if job.standing is not Standing.QUEUED or job.job in found.cancelled:
            continue
        if job.scheduling.not_before_time:
            left_s = instant(job.scheduling.not_before_time) - wall_time
            if left_s > 0:
                found.waiting[job.job] = f"starts at {job.scheduling.not_before_time} or later"
                found.next_look_s = left_s if found.next_look_s is None else min(found.next_look_s, left_s)
                continue
        before = [name for name in first_needs(job) if jobs[name].standing in WAITED_FOR]
        if before:
            found.waiting[job.job] = f"waits for {named(before)} to be COMPLETED"
        else:
            found.ready.append(job)
    return found


def first_needs(job: ClusterJob) -> tuple[str, ...]:
    """The jobs that must be COMPLETED before it starts for the first time."""
    return job.scheduling.after if job.epoch == 0 else ()


def named(jobs: list[str], most: int = 4) -> str:
    """`job a`, `jobs a, b`, `jobs a, b, c, d and 3 more`."""
    more = f" and {len(jobs) - most} more" if len(jobs) > most else ""
    return f"{'job' if len(jobs) == 1 else 'jobs'} {', '.join(jobs[:most])}{more}"


def _without_hope(jobs: Mapping[str, ClusterJob]) -> dict[str, str]:
    """QUEUED jobs that come after one that will never be COMPLETED, and those after them -> why."""
    followers: dict[str, list[str]] = defaultdict(list)
    for job in jobs.values():
        if job.standing is Standing.QUEUED:
            for name in first_needs(job):
                followers[name].append(job.job)
    ends = {name: _end_of(jobs.get(name)) for name in followers}
    lost = [(name, end) for name, end in ends.items() if end]
    found: dict[str, str] = {}
    while lost:
        name, end = lost.pop()
        for follower in followers.get(name, ()):
            if follower not in found:
                found[follower] = f"job {name}, which it comes after, {end}"
                lost.append((follower, "is CANCELLED"))
    return found


def _end_of(job: ClusterJob | None) -> str:
    """Empty: it is, or may still be, COMPLETED."""
    if job is None:
        return "was deleted"
    return f"is {job.standing}" if job.standing in {Standing.FAILED, Standing.CANCELLED} else ""


@dataclass
class Admission:
    """`running`: ACTIVE and staying. `starting`: QUEUED, and the pool has what they need, perhaps not idle
    yet. `preempted`: the job to stop -> for which one. `waiting`: QUEUED; first come first. `left`: what no
    minimum needs; negative if members were lost."""

    left: dict[Kind, int]
    running: list[ClusterJob] = field(default_factory=list)
    starting: list[ClusterJob] = field(default_factory=list)
    waiting: list[ClusterJob] = field(default_factory=list)
    preempted: dict[str, str] = field(default_factory=dict)


def admit(ready: Iterable[ClusterJob], usable: dict[Kind, int], short: set[str]) -> Admission:
    """`ready`: ACTIVE jobs that do not leave, and QUEUED ones whose time has come. `short`: ACTIVE ones below
    their minimum."""
    jobs = sorted(ready, key=attrgetter("turn"))
    found = Admission(dict(usable), [job for job in jobs if job.standing is Standing.ACTIVE])
    for job in found.running:
        _take(found, job)
    victims = _Victims(found.running)
    held_back: dict[int, dict[Kind, int]] = defaultdict(lambda: dict.fromkeys(KINDS, 0))  # by priority
    for job in jobs:
        starts = job.standing is not Standing.ACTIVE
        if job.job in found.preempted or not (starts or job.job in short):
            continue
        needs = job.needs if starts else dict.fromkeys(KINDS, 0)  # an ACTIVE one's were taken above
        before = _before(job, held_back) if starts else needs
        lacks: dict[Kind, int] = {kind: needs[kind] + before[kind] - found.left[kind] for kind in KINDS}
        for victim in victims.enough_for(job, lacks):
            found.preempted[victim.job] = job.job
            _give(found, victim)
            lacks = {kind: lacks[kind] - victim.needs[kind] for kind in KINDS}
        if starts and max(lacks.values()) <= 0:
            found.starting.append(job)
            _take(found, job)
        elif starts:
            found.waiting.append(job)
            if all(needs[kind] <= usable[kind] for kind in KINDS):
                for kind in KINDS:
                    held_back[job.scheduling.priority][kind] += needs[kind]
    found.running = [job for job in found.running if job.job not in found.preempted]
    return found


def _before(job: ClusterJob, held_back: dict[int, dict[Kind, int]]) -> dict[Kind, int]:
    """What jobs that come first wait for and this one must not take. A higher priority can have the members
    of a preemptible job back, one of the same priority cannot: whoever waits behind such a one passes nobody.
    """
    mine = job.scheduling.priority
    passes = job.scheduling.preemptible and mine not in held_back
    counted = [waits for priority, waits in held_back.items() if not (passes and priority > mine)]
    return {kind: sum(waits[kind] for waits in counted) for kind in KINDS}


def _take(found: Admission, job: ClusterJob) -> None:
    for kind, count in job.needs.items():
        found.left[kind] -= count


def _give(found: Admission, job: ClusterJob) -> None:
    for kind, count in job.needs.items():
        found.left[kind] += count


class _Victims:
    """Preemptible jobs that run. The lowest priority goes first, and of it the latest one."""

    def __init__(self, running: list[ClusterJob]) -> None:
        self._jobs = [job for job in reversed(running) if job.scheduling.preemptible]
        self._needs: dict[int, dict[Kind, int]] = defaultdict(lambda: dict.fromkeys(KINDS, 0))  # by priority
        for job in self._jobs:
            self._count(job, 1)

    def enough_for(self, claimant: ClusterJob, lacks: dict[Kind, int]) -> list[ClusterJob]:
        """The jobs to stop so that nothing is lacking; none if that is not possible, or nothing is."""
        priority = claimant.scheduling.priority
        below = [needs for level, needs in self._needs.items() if level < priority]
        if max(lacks.values()) <= 0 or any(
            lacks[kind] > sum(needs[kind] for needs in below) for kind in KINDS
        ):
            return []
        lacks, taken = dict(lacks), []
        for job in self._jobs:
            if max(lacks.values()) <= 0:
                break
            taken.append(job)
            lacks = {kind: lacks[kind] - job.needs[kind] for kind in KINDS}
        for job in list(taken):  # not those whose members turned out not to be needed
            without = {kind: lacks[kind] + job.needs[kind] for kind in KINDS}
            if max(without.values()) <= 0:
                taken.remove(job)
                lacks = without
        gone = {job.job for job in taken}
        self._jobs = [job for job in self._jobs if job.job not in gone]
        for job in taken:
            self._count(job, -1)
        return taken

    def _count(self, job: ClusterJob, sign: int) -> None:
        for kind, count in job.needs.items():
            self._needs[job.scheduling.priority][kind] += sign * count


def needed(state: ClusterState, wall_time: float) -> dict[Kind, int]:
    """How many members the pool needs so that every job that may run now can start, and has what a resize
    asked for. What a job could use beyond its least number of trainers is no need. `wall_time`: seconds since
    1970."""
    active = [job for job in state.jobs.values() if job.standing is Standing.ACTIVE and not job.leaving]
    jobs = [*active, *readiness(state.jobs, wall_time).ready]
    found = {kind: sum(_needed_by(job, kind) for job in jobs) for kind in KINDS}
    ended = (job for job in state.jobs.values() if job.standing.final)
    if not found["trainer"] and any(unfinished_tasks(job, state.task_runs.get(job.job, {})) for job in ended):
        found["trainer"] = 1  # post-tasks run on trainers
    return found


def _needed_by(job: ClusterJob, kind: Kind) -> int:
    if kind == "pserver":
        return job.pservers_wanted
    return job.least_trainers if job.trainers is None else job.most_trainers


@dataclass(frozen=True, slots=True)
class Claim:
    """`held`: what the job has now: of two that are equal, the one that has the trainer keeps it."""

    job: str
    least: int
    most: int
    priority: int
    weight: float
    held: int
    number: int


def shares(claims: Iterable[Claim], trainers: int) -> dict[str, int]:
    """Job -> trainers: its least number first, then priority, then weighted max-min fairness. The sum is more
    than `trainers` only if the least numbers alone are.

    Of two jobs with the same priority the one with fewer trainers for its weight gets the next one, until it
    has all that are of use to it. A job's least number is a floor, as in Hadoop's fair scheduler: it is not
    added to its fair share.
    """
    claims = list(claims)
    found = {claim.job: claim.least for claim in claims}
    left = trainers - sum(found.values())
    by_priority: dict[int, list[Claim]] = {}
    for claim in claims:
        by_priority.setdefault(claim.priority, []).append(claim)
    for priority in sorted(by_priority, reverse=True):
        level = by_priority[priority]
        if (wanted := sum(claim.most - claim.least for claim in level)) <= left:
            found.update((claim.job, claim.most) for claim in level)
            left -= wanted
            continue
        heap = [(_turn(claim, claim.least), claim.job, claim) for claim in level if claim.most > claim.least]
        heapq.heapify(heap)
        while heap and left > 0:
            _, job, claim = heapq.heappop(heap)
            found[job] += 1
            left -= 1
            if found[job] < claim.most:
                heapq.heappush(heap, (_turn(claim, found[job]), job, claim))
        break
    return found


def _turn(claim: Claim, has: int) -> tuple[float, float, bool, int]:
    return has / claim.weight, -claim.weight, claim.held <= has, claim.number

"""The pool as one schedule sees it: who holds which place, what is idle, what will be idle soon; and which idle members a job gets (IdlePlaces).

valid assignment     the job is ACTIVE in that epoch ──► held         else ──► dropped
no assignment        the member runs nothing ──► idle                 its old process still runs ──► ending

valid assignment, no member:
    its process is a member of the job still, or nobody knows ──► held, gone      for GONE_GRACE_S, then dropped
    its process has lost its key in the job, too              ──► lost            as long, or until another place replaces it
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from master_service.core.state.cluster import ClusterState, Place, is_task_wanted, reports_end
from trireme_shared.protocol.records.cluster import (
    Assignment,
    ClusterJob,
    Kind,
    PoolMember,
    Standing,
    TaskState,
    spoken,
)

GONE_GRACE_S = 10.0  # a member that vanished may come back with its process: its lease ran out, or etcd was silent
KINDS: tuple[Kind, Kind] = ("pserver", "trainer")


@dataclass
class PoolView:
    """`held`: places of ACTIVE jobs, `gone` ones too. `gone`: held, but there is no member; it may come back. `lost`: assigned, but
    neither the member nor its process is there: the job has to do without it. `renewed`: held, but the member registered anew since. `idle`: may be assigned now. `ending`: kind -> job whose old process still runs -> how
    many places will be idle after it. `usable`: all of these, those held by jobs that end or leave too. `drops`: assignments
    that are no more. `tasked`: run a pre- or post-task of a job, and are not `usable`. `reported`: whose
    member says how the task ended. `held_back`: so many trainers less are `usable`
    than there are, for such tasks. `next_look_s`: when a grace is over."""

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
    """Assigned places whose member is gone and whose process is no member of the job any more: both leases have ended. `present`: for
    each job whose members are known, the names of the pool's members that have a process among them."""
    held = [(place, state.assignments[place].job) for place in state.gone_since if place in state.assignments]
    return frozenset(place for place, job in held if job in present and place[1] not in present[job])


def look(state: ClusterState, now: float, lost: Collection[Place]) -> PoolView:
    view = PoolView(
        held={kind: {} for kind in KINDS},
        idle={kind: [] for kind in KINDS},
        ending={kind: Counter() for kind in KINDS},
        usable=dict.fromkeys(KINDS, 0),
    )
    for place, held in sorted(state.assignments.items()):
        _look_at_assignment(view, state, place, held, now, lost)
    for place, member in sorted(state.members.items()):
        if state.takes_work(place) and place not in view.tasked:
            view.usable[place[0]] += 1
            _look_at_member(view, state, place, member)
    return view


def unfit_counts(state: ClusterState) -> dict[Kind, Counter[str]]:
    """How many members of a kind are of no use for an ACTIVE job's epoch, by job."""
    counts: dict[Kind, Counter[str]] = {kind: Counter() for kind in KINDS}
    for place, member in state.members.items():
        if not state.takes_work(place):
            continue
        for job in {*(start[0] for start in state.unfit.get(place, ())), member.running} & state.jobs.keys():
            counts[place[0]][job] += not state.fits(place, state.jobs[job])
    return counts


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
    """Idle members of one kind, by host: a job gets its trainers together on few hosts, its parameter servers on many. Hosts are found by how many
    they have, in O(log hosts)."""

    def __init__(self, places: Iterable[Place], members: Mapping[Place, PoolMember]) -> None:
        self._hosts: dict[str, list[Place]] = defaultdict(list)
        for place in sorted(places, reverse=True):
            self._hosts[members[place].host].append(place)  # taken from the end: the first by name first
        self._aside: set[str] = set()
        self._by_count: dict[int, list[str]] = defaultdict(list)  # heaps; an entry counts if the host still has so many
        for host, there in self._hosts.items():
            self._by_count[len(there)].append(host)
        for hosts in self._by_count.values():
            heapq.heapify(hosts)

    def take_together(self, count: int, fits: Fits, hosts: Counter[str]) -> list[Place]:
        """At most `count`. `hosts`: how many the job has where: there first; then the host that has just enough, or most."""
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
        """At most `count`. `hosts`: how many the job has where: others first, those that have most idle ones."""
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
        return next((host for there in sorted(self._by_count, reverse=True) if (host := self._first(there))), "")

    def _set_aside(self, host: str) -> str:
        """It is not found any more until it is put back."""
        self._aside.add(host)
        return host

    def _put_back(self, hosts: list[str]) -> None:
        for host in hosts:
            self._aside.discard(host)
            if self._hosts[host]:
                heapq.heappush(self._by_count[len(self._hosts[host])], host)

"""Who runs: which QUEUED jobs may start at all (`readiness`), which of them have what they need (`admit`), how many trainers each gets (`shares`).

Each job needs its parameter servers and its least number of trainers at once (gang), or it waits. Jobs are asked in the order of priority, then of
submission. A job that does not fit holds back later ones, which would otherwise take one by one what it waits for; trainers above a minimum work for
running jobs meanwhile. A preemptible job of a lower priority is not held back, because it can be taken away again.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from master_service.core.decisions.scheduling.pool_view import KINDS
from master_service.core.state.cluster import ClusterState, unfinished_tasks
from trireme_shared.protocol.records.cluster import ClusterJob, Kind, Standing
from trireme_shared.protocol.times import instant

WAITED_FOR = {Standing.QUEUED, Standing.ACTIVE, Standing.PAUSED}


@dataclass
class Readiness:
    """`waiting`, `cancelled`: job -> reason. `next_look_s`: until the next time is reached, seconds."""

    ready: list[ClusterJob] = field(default_factory=list)
    waiting: dict[str, str] = field(default_factory=dict)
    cancelled: dict[str, str] = field(default_factory=dict)
    next_look_s: float | None = None


def readiness(jobs: Mapping[str, ClusterJob], wall_time: float) -> Readiness:
    """The QUEUED jobs whose time has come, and before which all jobs are COMPLETED. A job that was ACTIVE once (it was paused or preempted) does
    not wait for `after` again. `wall_time`: seconds since 1970."""
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
    """`running`: ACTIVE and staying. `starting`: QUEUED, and the pool has what they need, perhaps not idle yet. `preempted`:
    the job to stop -> for which one. `waiting`: QUEUED; first come first. `left`: what no minimum needs; negative if members
    were lost."""

    left: dict[Kind, int]
    running: list[ClusterJob] = field(default_factory=list)
    starting: list[ClusterJob] = field(default_factory=list)
    waiting: list[ClusterJob] = field(default_factory=list)
    preempted: dict[str, str] = field(default_factory=dict)


def need(job: ClusterJob) -> dict[Kind, int]:
    return {"pserver": job.pservers_wanted, "trainer": job.least_trainers}


def in_turn(job: ClusterJob) -> tuple[int, bool, int, str]:
    """Sorts jobs: those that come first."""
    return -job.scheduling.priority, job.standing is not Standing.ACTIVE, job.number, job.job


def admit(ready: Iterable[ClusterJob], usable: dict[Kind, int], short: set[str]) -> Admission:
    """`ready`: ACTIVE jobs that do not leave, and QUEUED ones whose time has come. `short`: ACTIVE ones below their minimum."""
    jobs = sorted(ready, key=in_turn)
    found = Admission(dict(usable), [job for job in jobs if job.standing is Standing.ACTIVE])
    for job in found.running:
        _take(found, job)
    victims = _Victims(found.running)
    held_back: dict[int, dict[Kind, int]] = defaultdict(lambda: dict.fromkeys(KINDS, 0))  # by priority
    for job in jobs:
        starts = job.standing is not Standing.ACTIVE
        if job.job in found.preempted or not (starts or job.job in short):
            continue
        needs = need(job) if starts else dict.fromkeys(KINDS, 0)  # an ACTIVE one's were taken above
        before = _before(job, held_back) if starts else needs
        lacks: dict[Kind, int] = {kind: needs[kind] + before[kind] - found.left[kind] for kind in KINDS}
        for victim in victims.enough_for(job, lacks):
            found.preempted[victim.job] = job.job
            _give(found, victim)
            lacks = {kind: lacks[kind] - need(victim)[kind] for kind in KINDS}
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
    """What jobs that come first wait for and this one must not take."""
    counted = [
        waits
        for priority, waits in held_back.items()
        if not (job.scheduling.preemptible and priority > job.scheduling.priority)
    ]
    return {kind: sum(waits[kind] for waits in counted) for kind in KINDS}


def _take(found: Admission, job: ClusterJob) -> None:
    for kind, count in need(job).items():
        found.left[kind] -= count


def _give(found: Admission, job: ClusterJob) -> None:
    for kind, count in need(job).items():
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
        if max(lacks.values()) <= 0 or any(lacks[kind] > sum(needs[kind] for needs in below) for kind in KINDS):
            return []
        lacks, taken = dict(lacks), []
        for job in self._jobs:
            if max(lacks.values()) <= 0:
                break
            taken.append(job)
            lacks = {kind: lacks[kind] - need(job)[kind] for kind in KINDS}
        for job in list(taken):  # not those whose members turned out not to be needed
            without = {kind: lacks[kind] + need(job)[kind] for kind in KINDS}
            if max(without.values()) <= 0:
                taken.remove(job)
                lacks = without
        gone = {job.job for job in taken}
        self._jobs = [job for job in self._jobs if job.job not in gone]
        for job in taken:
            self._count(job, -1)
        return taken

    def _count(self, job: ClusterJob, sign: int) -> None:
        for kind, count in need(job).items():
            self._needs[job.scheduling.priority][kind] += sign * count


def needed(state: ClusterState, wall_time: float) -> dict[Kind, int]:
    """How many members the pool needs so that every job that may run now can start, and has what a resize asked for. What a job could use beyond its least number of
    trainers is no need. `wall_time`: seconds since 1970."""
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
    """Job -> trainers: its least number first, then priority, then weighted max-min fairness. The sum is more than `trainers` only if the least
    numbers alone are.

    Of two jobs with the same priority the one with fewer trainers for its weight gets the next one, until it has all that are of use
    to it. A job's least number is a floor, as in Hadoop's fair scheduler: it is not added to its fair share.
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

"""Who runs: each job needs its parameter servers and its least number of trainers at once (gang), or it waits.

Jobs are asked in the order of priority, then of submission. A job that does not fit holds back later ones, which would otherwise
take one by one what it waits for; trainers above a minimum work for running jobs meanwhile. A preemptible job of a lower
priority is not held back, because it can be taken away again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from master_service.core.decisions.scheduling.readiness import readiness
from master_service.core.state.cluster import ClusterState, unfinished
from trireme_shared.protocol.records.cluster import ClusterJob, Kind, Standing

KINDS: tuple[Kind, Kind] = ("pserver", "trainer")


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
    if not found["trainer"] and any(unfinished(job, state.task_runs.get(job.job, {})) for job in ended):
        found["trainer"] = 1  # post-tasks run on trainers
    return found


def _needed_by(job: ClusterJob, kind: Kind) -> int:
    if kind == "pserver":
        return job.pservers_wanted
    return job.least_trainers if job.trainers is None else job.most_trainers

"""Which QUEUED jobs may start at all: their time has come, and the jobs before them are COMPLETED.

A job that was ACTIVE once (it was paused or preempted) does not wait for `after` again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from trireme_shared.protocol.records.cluster import ClusterJob, Standing
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
    """`wall_time`: seconds since 1970."""
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

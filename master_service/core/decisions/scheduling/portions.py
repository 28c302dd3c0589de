"""A schedule in portions, one for each transaction, each with the events of its changes.

schedule ──next──► written ──next──► written ─► …      what a change is about has changed in between ─► stale: schedule anew
"""

from __future__ import annotations

from collections import deque

from master_service.core.changes import Decision, Event
from master_service.core.decisions.scheduling.schedule import Schedule
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
from trireme_shared.protocol.records.cluster import TaskState


class Portions:
    """What is left to write of a schedule that was just made of `state`. A transaction takes at most `most` changes and `most_bytes`
    of values. `stale`: the rest must not be written."""

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
        """The next portion. None of it if anything in it is about what has changed since the schedule was made."""
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

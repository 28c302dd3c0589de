"""What the leader knows of its cluster: jobs, pool members, assignments. Only `ClusterState.apply` changes
jobs and assignments.

The functions at the end tell how the pre- and post-tasks of a job stand, by its record and their runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

from master_service.core.changes import Decision, DropAnswer, DropEvents, PutEvents
from master_service.core.state.kept import EventLog, KeptAnswers
from trireme_shared.protocol.errors import NotFound
from trireme_shared.protocol.records.cluster import (
    Assignment,
    ClusterJob,
    Drain,
    JobSchedule,
    Kind,
    PoolMember,
    Source,
    Standing,
    TaskRun,
    TaskState,
)
from trireme_shared.protocol.records.job_choices import name_problem
from trireme_shared.protocol.records.operations import KeptAnswer, Operation

A = TypeVar("A")
Place = tuple[Kind, str]  # kind and id of a pool member
Places = dict[Kind, tuple[Place, ...]]


@dataclass(frozen=True, slots=True)
class PutJob:
    job: ClusterJob


@dataclass(frozen=True, slots=True)
class DropJob:
    """`has_keys`: the keys below the job's name are the job's own; else they are a run's and stay."""

    job: str
    has_keys: bool = True


@dataclass(frozen=True, slots=True)
class PutTaskRun:
    run: TaskRun


@dataclass(frozen=True, slots=True)
class PutAssignment:
    place: Place
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class DropAssignment:
    place: Place


@dataclass(frozen=True, slots=True)
class PutDrain:
    place: Place
    drain: Drain


@dataclass(frozen=True, slots=True)
class DropDrain:
    place: Place


@dataclass(frozen=True, slots=True)
class PutSource:
    digest: str
    source: Source


@dataclass(frozen=True, slots=True)
class DropSource:
    digest: str


@dataclass(frozen=True, slots=True)
class PutSchedule:
    schedule: JobSchedule


@dataclass(frozen=True, slots=True)
class DropSchedule:
    name: str


@dataclass(frozen=True, slots=True)
class PutJobOperation:
    job: str
    operation: Operation


@dataclass(frozen=True, slots=True)
class DropJobOperation:
    job: str
    operation_id: str


ClusterChange = (
    PutJob
    | DropJob
    | PutTaskRun
    | PutAssignment
    | DropAssignment
    | PutDrain
    | DropDrain
    | PutSource
    | DropSource
    | PutSchedule
    | DropSchedule
    | PutJobOperation
    | DropJobOperation
    | KeptAnswer
    | DropAnswer
    | PutEvents
    | DropEvents
)


ClusterDecision = Decision[A, ClusterChange]


@dataclass
class ClusterState:
    """`members`: as the watch tells, the newest registration of each place. `moved`: when (monotonic s) a
    place was assigned or unassigned last in this term. `gone_since`: when an assigned place was first seen
    without a member. `unfit`: for which (job, epoch) a place is of no use any more, because the process ended
    there again and again (how, as a sentence), or ended well (""). `drains`: places that get no work, whether
    they have a member now or not. `task_runs`: by job, the pre- and post-tasks that were begun, and
    `tasks_written`: when (monotonic s) each was written last in this term. `operations`: by job and id, what
    users asked of whole jobs, of deleted ones too. `unreadable_schedules` begin no jobs: what can be read of
    them."""

    jobs: dict[str, ClusterJob] = field(default_factory=dict)
    schedules: dict[str, JobSchedule] = field(default_factory=dict)
    unreadable_schedules: dict[str, JobSchedule] = field(default_factory=dict)
    members: dict[Place, PoolMember] = field(default_factory=dict)
    assignments: dict[Place, Assignment] = field(default_factory=dict)
    drains: dict[Place, Drain] = field(default_factory=dict)
    task_runs: dict[str, dict[str, TaskRun]] = field(default_factory=dict)
    operations: dict[str, dict[str, Operation]] = field(default_factory=dict)
    answers: KeptAnswers = field(default_factory=KeptAnswers)
    tasks_written: dict[str, dict[str, float]] = field(default_factory=dict)
    moved: dict[Place, float] = field(default_factory=dict)
    gone_since: dict[Place, float] = field(default_factory=dict)
    unfit: dict[Place, dict[tuple[str, int], str]] = field(default_factory=dict)
    events: EventLog = field(default_factory=EventLog)
    #: How many changes were applied.
    decided: int = field(default=0, init=False, repr=False, compare=False)
    #: (job, kind) -> the places that train it, of `assignments`.
    _trains: dict[tuple[str, Kind], dict[Place, None]] = field(default_factory=dict, init=False, repr=False)
    #: The places that run tasks, of `assignments`.
    _tasked: dict[Place, None] = field(default_factory=dict, init=False, repr=False)
    #: Job -> another object after each change of its places.
    _revisions: dict[str, object] = field(default_factory=dict, init=False, repr=False, compare=False)
    #: By job: its record, its revision, and what `settle` was told of them.
    _settled: dict[str, tuple[ClusterJob, object, Places]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __repr__(self) -> str:
        return (
            f"<ClusterState {len(self.jobs)} jobs, {len(self.members)} members, "
            f"{len(self.assignments)} assigned>"
        )

    def job(self, name: str) -> ClusterJob:
        """Raises NotFound."""
        found = self.jobs.get(name)
        if found is None:
            raise NotFound(
                f"there is no job {name} in this cluster",
                hint=name_problem(name) or "`trireme jobs` lists them",
            )
        return found

    @property
    def unreadable(self) -> list[ClusterJob | JobSchedule]:
        jobs = [job for job in self.jobs.values() if job.standing is Standing.UNREADABLE]
        return [*jobs, *self.unreadable_schedules.values()]

    def schedule(self, name: str) -> JobSchedule:
        """Raises NotFound."""
        found = self.schedules.get(name) or self.unreadable_schedules.get(name)
        if found is None:
            raise NotFound(
                f"there is no schedule {name} in this cluster", hint="`trireme schedules` lists them"
            )
        return found

    def operation(self, job: str, operation_id: str) -> Operation | None:
        """None: there is none of the cluster's own; the job's leader keeps others."""
        return self.operations.get(job, {}).get(operation_id)

    def place(self, member: str) -> Place:
        """Of a member that is there, or is drained. Raises NotFound."""
        places: tuple[Place, Place] = (("trainer", member), ("pserver", member))
        for place in places:
            if place in self.members or place in self.drains:
                return place
        raise NotFound(f"the pool has no member {member}", hint="`trireme pool` lists them", member=member)

    def set_aside(self, name: str, reason: str) -> ClusterJob:
        """In place, of a job that is there: this version cannot read its keys. etcd keeps its record as it
        is, for the next leader."""
        job = self.jobs[name].with_fields(standing=Standing.UNREADABLE, reason=reason)
        self.jobs[name] = job
        return job

    def uses_source(self, digest: str) -> int:
        """How many jobs and schedules run this script."""
        schedules = (*self.schedules.values(), *self.unreadable_schedules.values())
        jobs = sum(job.source_digest == digest for job in self.jobs.values())
        return jobs + sum(schedule.source_digest == digest for schedule in schedules)

    def assigned_to(self, job: str, kind: Kind) -> list[Place]:
        """The places that train it; not those that run its tasks."""
        return list(self._trains.get((job, kind), ()))

    def assigned_to_others(self, jobs: Collection[str]) -> list[Place]:
        """The assigned places that train none of these jobs, in order."""
        of_others = (places for (job, _), places in self._trains.items() if job not in jobs)
        return sorted([*chain.from_iterable(of_others), *self._tasked])

    def revision_of(self, job: str) -> object:
        """The same object as long as its places, their drains, and what their members run, are the same."""
        return self._revisions.get(job)

    def settle(self, job: ClusterJob, places: Places) -> None:
        """In place: all places that train the job, by kind, have members that go on with it."""
        self._settled[job.job] = job, self._revisions.get(job.job), places

    def settled(self, job: ClusterJob) -> Places | None:
        """What `settle` was told, if neither the job nor anything at its places has changed since. A cluster
        has thousands of places, and few change at a time."""
        known = self._settled.get(job.job)
        same = known is not None and known[0] is job and known[1] is self._revisions.get(job.job)
        return known[2] if known is not None and same else None

    def takes_work(self, place: Place) -> bool:
        """Whether there is a member that is not about to leave, and that nobody has drained."""
        member = self.members.get(place)
        return member is not None and not member.draining and place not in self.drains

    def fits(self, place: Place, job: ClusterJob) -> bool:
        """Whether the place may run a process of the job's present epoch."""
        member = self.members.get(place)
        start = (job.job, job.epoch)
        spent = (
            member is not None
            and not member.task
            and (member.ended or bool(member.trouble))
            and (member.running, member.epoch) == start
        )
        return not spent and start not in self.unfit.get(place, {})

    def see(self, place: Place, member: PoolMember | None, now: float) -> None:
        """In place: the watch saw this registration, or (None) that there is none any more. `now`: monotonic,
        s."""
        self._changed_at(place)
        if member is None:
            self.members.pop(place, None)
            if place in self.assignments:
                self.gone_since.setdefault(place, now)
            else:
                self._forget(place)
            return
        self.members[place] = member
        self.gone_since.pop(place, None)
        if member.running and not member.task and (member.trouble or member.ended):
            known = self.unfit.get(place, {}).items()
            still = {start: trouble for start, trouble in known if self._current(*start)}
            self.unfit[place] = still | {(member.running, member.epoch): member.trouble}

    def apply(self, change: ClusterChange, now: float) -> None:
        """In place. `now`: monotonic, s."""
        self.decided += 1
        match change:
            case PutJob(job):
                self.jobs[job.job] = job
            case DropJob(job, _):
                self.jobs.pop(job, None)
                self.task_runs.pop(job, None)
                self._revisions.pop(job, None)
                self._settled.pop(job, None)
                self.tasks_written.pop(job, None)
            case PutTaskRun(run):
                self.task_runs.setdefault(run.job, {})[run.name] = run
                self.tasks_written.setdefault(run.job, {})[run.name] = now
            case PutAssignment(place, assignment):
                self._unassign(place)
                self.assignments[place] = assignment
                self._changed(assignment.job)
                if assignment.task:
                    self._tasked[place] = None
                else:
                    self._trains.setdefault((assignment.job, place[0]), {})[place] = None
                self.moved[place] = now
                if place not in self.members:
                    self.gone_since.setdefault(place, now)
            case DropAssignment(place):
                self._unassign(place)
                self.moved[place] = now
                if place not in self.members:
                    self._forget(place)
            case PutDrain(place, drain):
                self.drains[place] = drain
                self._changed_at(place)
            case DropDrain(place):
                self.drains.pop(place, None)
                self._changed_at(place)
            case PutSchedule(schedule):
                self.schedules[schedule.name] = schedule
            case DropSchedule(name):
                self.schedules.pop(name, None)
                self.unreadable_schedules.pop(name, None)
            case PutJobOperation(job, operation):
                self.operations.setdefault(job, {})[operation.operation_id] = operation
            case DropJobOperation(job, operation_id):
                self.operations.get(job, {}).pop(operation_id, None)
                if not self.operations.get(job, True):
                    del self.operations[job]
            case KeptAnswer() | DropAnswer():
                self.answers.apply(change)
            case PutEvents() | DropEvents():
                self.events.apply(change)
            case PutSource() | DropSource():
                pass  # only etcd holds the texts

    def _unassign(self, place: Place) -> None:
        held = self.assignments.pop(place, None)
        if held is None:
            return
        self._changed(held.job)
        if held.task:
            del self._tasked[place]
        else:
            places = self._trains[held.job, place[0]]
            del places[place]
            if not places:
                del self._trains[held.job, place[0]]

    def _changed_at(self, place: Place) -> None:
        if (held := self.assignments.get(place)) is not None:
            self._changed(held.job)

    def _changed(self, job: str) -> None:
        if job in self.jobs:
            self._revisions[job] = object()

    def _current(self, job: str, epoch: int) -> bool:
        found = self.jobs.get(job)
        return found is not None and found.epoch == epoch

    def _forget(self, place: Place) -> None:
        """No member and no assignment: nothing is kept of the place, so that names of members may come and
        go."""
        for kept in (self.moved, self.gone_since, self.unfit):
            kept.pop(place, None)


Runs = Mapping[str, TaskRun]


def is_task_wanted(job: ClusterJob, name: str) -> bool:
    """Whether that task may run now, as far as the job is concerned."""
    task = job.spec.named_tasks.get(name)
    if task is None:
        return False
    if name.startswith("pre-"):
        return job.standing is Standing.QUEUED
    return job.standing is Standing.COMPLETED or (job.standing.final and task.when == "always")


def reports_end(member: PoolMember, held: Assignment) -> bool:
    """Whether the member says how exactly this attempt ended."""
    same = (member.running, member.task, member.attempt) == (held.job, held.task, held.attempt)
    return same and member.incarnation == held.incarnation and (member.ended or bool(member.trouble))


def unfinished_tasks(job: ClusterJob, runs: Runs) -> list[str]:
    """Names of the tasks that may run now and are not over, in their order."""
    if not (job.spec.pre_tasks or job.spec.post_tasks):
        return []
    return [
        name
        for name in job.spec.named_tasks
        if is_task_wanted(job, name) and not (name in runs and runs[name].state.over)
    ]


def failed_tasks(runs: Runs, stage: str = "") -> list[TaskRun]:
    """`stage`: pre or post; "": both."""
    found = (run for _, run in sorted(runs.items()) if run.name.startswith(stage))
    return [run for run in found if run.state is TaskState.FAILED]


def run_of(job: ClusterJob, runs: Runs, name: str) -> TaskRun:
    """As it was written last; of one that was never begun: WAITING."""
    return runs.get(name) or TaskRun(job=job.job, name=name)

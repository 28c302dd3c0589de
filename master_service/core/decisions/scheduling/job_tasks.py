"""Pre- and post-tasks of jobs on idle trainers of the pool: who runs which attempt, and what its end means.
Decisions only.

A task is RUNNING in attempt n on a member exactly while that member has the assignment of attempt n. Its end
is read from the member's registration and written here, under the leader's fence: the report of any other
attempt counts for nothing, so one success is recorded. A member that is lost takes its report along: the task
then runs again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from master_service.core.changes import Event
from master_service.core.decisions.scheduling.admission import PoolView
from master_service.core.state.cluster import (
    ClusterChange,
    ClusterState,
    Place,
    PutAssignment,
    PutTaskRun,
    failed_tasks,
    is_task_wanted,
    run_of,
    unfinished_tasks,
)
from trireme_shared.protocol.records.cluster import (
    Assignment,
    ClusterJob,
    PoolMember,
    Standing,
    TaskRun,
    TaskState,
    spoken,
)
from trireme_shared.protocol.times import rfc3339

SHARE = 4  # one in so many trainers may run tasks at a time, and one at least
MAX_ENDS, MAX_STARTS = 30, 30  # in one schedule: what belongs together is then written in one transaction
MAX_LOST = 20  # attempts whose member was lost: a task that ends its host each time is given up
FIRST_RETRY_S, MAX_RETRY_S = 2.0, 60.0


@dataclass
class TaskTurn:
    """`changes`: written before all others, by place or `<job>/<task>`; `events`: of these. `ready`: QUEUED
    jobs that no pre-task holds back. `waiting`: QUEUED jobs that one does -> why. `failed`: QUEUED jobs whose
    pre-task has failed -> why."""

    changes: dict[str | Place, ClusterChange] = field(default_factory=dict)
    events: dict[str, list[Event]] = field(default_factory=dict)
    ready: list[ClusterJob] = field(default_factory=list)
    waiting: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def take_turn(
    state: ClusterState, view: PoolView, ready: Iterable[ClusterJob], now: float, wall_time: float
) -> TaskTurn:
    """`ready`: QUEUED jobs whose time has come. `view`, in place: idle trainers are taken from it, and, if
    there are none, so many are held back that running jobs give some up. `now`: monotonic, s; `wall_time`:
    seconds since 1970."""
    return _Turn(state, view, now, wall_time).run(list(ready))


class _Turn:
    def __init__(self, state: ClusterState, view: PoolView, now: float, wall_time: float) -> None:
        self.state, self.view, self.now, self.wall_time = state, view, now, wall_time
        self.turn = TaskTurn()
        self.runs = {job: dict(runs) for job, runs in state.task_runs.items()}

    def run(self, ready: list[ClusterJob]) -> TaskTurn:
        ended = 0
        for runs in self.state.task_runs.values():
            for run in runs.values():
                if run.state is not TaskState.RUNNING or self._goes_on(run):
                    continue
                if ended == MAX_ENDS:
                    self._keep(run)
                else:
                    self._end(run)
                    ended += 1
        post = [job for job in self.state.jobs.values() if job.standing.final and job.spec.post_tasks]
        due = [job for job in sorted([*ready, *post], key=attrgetter("turn")) if self._is_due(job)]
        self._start(due)
        return self.turn

    # ---------------------------------------------------------------- ends

    def _goes_on(self, run: TaskRun) -> bool:
        held = self.view.tasked.get(("trainer", run.member))
        return held is not None and (held.job, held.task, held.attempt) == (run.job, run.name, run.attempt)

    def _keep(self, run: TaskRun) -> None:
        """Its end is written by the next schedule, which must still find the report."""
        place: Place = ("trainer", run.member)
        if place in self.view.drops:
            del self.view.drops[place]
            self.view.tasked[place] = self.state.assignments[place]
        self.view.look_again(0.0)

    def _end(self, run: TaskRun) -> None:
        """The attempt is over: it reported its end, is not wanted any more, or its member was lost."""
        job, task = self.state.jobs[run.job], self.state.jobs[run.job].spec.named_tasks[run.name]
        member = self.state.members.get(("trainer", run.member))
        if not is_task_wanted(job, run.name):
            over = job.standing in (Standing.COMPLETED, Standing.FAILED, Standing.CANCELLED)
            state = TaskState.CANCELLED if over else TaskState.WAITING
            self._write(run, state, f"job {job.job} is {job.standing}")
        elif member is None or ("trainer", run.member) not in self.view.reported:
            self._lose(run)
        elif member.exit_code == 0:
            self._write(run, TaskState.SUCCEEDED, "", member)
        else:
            failures = run.failures + 1
            why = member.trouble or f"exit code {member.exit_code}"
            left = task.retries + 1 - failures
            state = TaskState.WAITING if left > 0 else TaskState.FAILED
            self._write(run.with_fields(failures=failures), state, why, member)

    def _lose(self, run: TaskRun) -> None:
        lost = run.lost + 1
        run = run.with_fields(lost=lost)
        why = f"member {run.member} was lost in attempt {run.attempt}"
        if lost < MAX_LOST:
            self._write(run, TaskState.WAITING, why)
        else:
            self._write(run, TaskState.FAILED, f"{why}; {lost} attempts ended so")

    def _write(self, run: TaskRun, state: TaskState, reason: str, member: PoolMember | None = None) -> None:
        if member is not None:
            run = run.with_fields(exit_code=member.exit_code, output=member.output)
        end = rfc3339(self.wall_time) if state.over or member else run.end_time
        self._put(run.with_fields(state=state, reason=reason, end_time=end))
        why = f": {reason}" if reason else ""
        self._say("job_task_ended", f"{spoken(run.name)} of job {run.job} is {state}{why}", run)

    def _put(self, run: TaskRun) -> None:
        self.runs.setdefault(run.job, {})[run.name] = run
        self.turn.changes.pop(_about(run), None)
        self.turn.changes[_about(run)] = PutTaskRun(run)

    # ---------------------------------------------------------------- starts

    def _is_due(self, job: ClusterJob) -> bool:
        """Whether its next task may be started now. Says what becomes of a QUEUED job meanwhile."""
        runs = self.runs.get(job.job, {})
        queued = job.standing is Standing.QUEUED
        if queued and (bad := failed_tasks(runs, "pre")):
            self.turn.failed[job.job] = f"its {spoken(bad[0].name)} failed: {bad[0].reason}"
            return False
        names = unfinished_tasks(job, runs)
        if not names:
            if queued:
                self.turn.ready.append(job)
            return False
        run = run_of(job, runs, names[0])
        if run.state is TaskState.RUNNING:
            self._wait(job, f"its {spoken(run.name)} runs on {run.member}, attempt {run.attempt}")
            return False
        if run.failures and (left_s := self._pause_left_s(run)) > 0:
            self.view.look_again(left_s)
            self._wait(job, f"its {spoken(run.name)} failed ({run.reason}) and is tried again soon")
            return False
        return True

    def _pause_left_s(self, run: TaskRun) -> float:
        """After a failure. A new leader counts it from its own beginning."""
        if self.runs[run.job][run.name] is not self.state.task_runs.get(run.job, {}).get(run.name):
            return FIRST_RETRY_S  # its end is being written
        pause_s: float = min(MAX_RETRY_S, FIRST_RETRY_S * 2.0 ** min(run.failures - 1, 10))
        return self.state.tasks_written[run.job][run.name] + pause_s - self.now

    def _start(self, due: list[ClusterJob]) -> None:
        trainers = self.view.usable["trainer"] + len(self.view.tasked)
        room = max(1, trainers // SHARE) - len(self.view.tasked)
        started = 0
        for job in due:
            run = run_of(
                job, self.runs.get(job.job, {}), unfinished_tasks(job, self.runs.get(job.job, {}))[0]
            )
            if room <= 0 or started == MAX_STARTS:
                self._wait(job, f"its {spoken(run.name)} waits: {len(self.view.tasked)} other tasks run")
                continue
            room -= 1
            if (place := self._idle_place(run)) is None:
                self.view.usable["trainer"] -= 1  # held back, so that a job above its minimum gives one up
                self.view.held_back += 1
                self._wait(job, f"its {spoken(run.name)} waits for a trainer that is idle")
                continue
            started += 1
            self._assign(job, run, place)

    def _idle_place(self, run: TaskRun) -> Place | None:
        """Not the one that just failed it, and none with a GPU, if there are others."""
        members = self.state.members
        return min(
            self.view.idle["trainer"],
            key=lambda place: (place[1] == run.member, members[place].device != "cpu", place),
            default=None,
        )

    def _assign(self, job: ClusterJob, run: TaskRun, place: Place) -> None:
        member, now = self.state.members[place], rfc3339(self.wall_time)
        held = Assignment(
            job=job.job,
            epoch=job.epoch,
            incarnation=member.incarnation,
            assign_time=now,
            task=run.name,
            attempt=run.attempt + 1,
            limit_s=job.spec.named_tasks[run.name].timeout_s,
        )
        started = run.with_fields(
            state=TaskState.RUNNING,
            attempt=run.attempt + 1,
            member=member.member,
            host=member.host,
            incarnation=member.incarnation,
            start_time=now,
        )
        self._put(started)
        self.turn.changes[place] = PutAssignment(place, held)  # right after its run: both in one transaction
        self.view.idle["trainer"].remove(place)
        self.view.usable["trainer"] -= 1
        self.view.tasked[place] = held
        self._wait(job, f"its {spoken(run.name)} runs on {member.member}, attempt {held.attempt}")
        message = f"{spoken(run.name)} of job {job.job} starts on {member.member}, attempt {held.attempt}"
        self._say("job_task_started", message, run)

    def _wait(self, job: ClusterJob, why: str) -> None:
        if job.standing is Standing.QUEUED:
            self.turn.waiting[job.job] = why

    def _say(self, name: str, message: str, run: TaskRun) -> None:
        event = Event(name, message, {"job": run.job, "task": run.name})
        self.turn.events.setdefault(_about(run), []).append(event)


def _about(run: TaskRun) -> str:
    return f"{run.job}/{run.name}"

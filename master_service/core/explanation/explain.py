"""Why a job does not progress and what to do: a pure function of the job and of what its leader has observed.

over? ─► obstacles (nothing can be trained) ─► still: who is waited for, else NO_PROGRESS ─► notes
                                          `──► moving: PROGRESS_IS_FINE, who is waited for ─► notes

A new situation is one rule in one of the tuples below, one Code, and one row in docs/explain.md. Of a job of
a cluster that nobody leads now, `explain_unled` tells that it waits, was stopped, or is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from master_service.core.explanation import obstacles, training
from master_service.core.explanation.obstacles import failure_details
from master_service.core.explanation.situation import Situation
from master_service.core.state.cluster import ClusterState, failed_tasks, run_of, unfinished_tasks
from trireme_shared.protocol.explanations import Cause, Code, Explanation, explanation_of
from trireme_shared.protocol.records import JobState
from trireme_shared.protocol.records.cluster import ClusterJob, Kind, Standing, TaskState, in_words, spoken
from trireme_shared.protocol.times import instant

Rule = Callable[[Situation], Cause | None]

ENDS: Sequence[Rule] = (obstacles.completed, obstacles.failed)
OBSTACLES: Sequence[Rule] = (
    obstacles.etcd_full,
    obstacles.etcd_silent,
    obstacles.storage_away,
    obstacles.rolling_back,
    obstacles.loading_checkpoint,
    obstacles.nobody_can_start,
    obstacles.pservers_missing,
    obstacles.no_trainer,
    obstacles.pause,
    obstacles.initialising,
    obstacles.fewer_than_min_members,
    obstacles.waiting,
)
AWAITED: Sequence[Rule] = (
    training.silent_member,
    training.lanes_not_started,
    obstacles.refusals,
    obstacles.start_failures,
    obstacles.failing_tasks,
    training.awaited_slower_trainer,  # before late tasks: a task may be late because its trainer waits
    training.late_tasks,
    training.awaited_evaluation,
    training.slow_minibatch,
)
NOTES: Sequence[Rule] = (
    training.absent_pservers,
    training.failing_checkpoints,
    training.waiting_operations,
    training.discarded_tasks,
    training.trainers_without_lanes,
    training.fewer_trainers,
    obstacles.fetching,
)


def explain(now: Situation) -> Explanation:
    """The most important cause first."""
    name = now.job.spec.job
    if ends := _apply(ENDS, now):
        return explanation_of(name, *ends)
    obstacles_now = _apply(OBSTACLES, now)
    awaited, notes = _apply(AWAITED, now), _apply(NOTES, now)
    if obstacles_now:
        known = {cause.code for cause in obstacles_now}
        rest = [cause for cause in (*awaited, *notes) if cause.code not in known]
        return explanation_of(name, *obstacles_now, *rest)
    if now.is_still:
        return explanation_of(name, *(awaited or [training.no_progress(now)]), *notes)
    return explanation_of(name, training.progress(now), *awaited, *notes)


def _apply(rules: Sequence[Rule], now: Situation) -> list[Cause]:
    """What the rules found, in their order."""
    return [cause for rule in rules if (cause := rule(now)) is not None]


SHOWN = 5


def explain_unled(state: ClusterState, job: ClusterJob, wall_time: float, last: JobState) -> Explanation:
    """`wall_time`: seconds since 1970. `last`: the job's state as its last term left it."""
    cause = _cause(state, job, wall_time)
    if job.standing is Standing.FAILED:
        cause = cause.with_fields(details=(*cause.details, *failure_details(last)))
    return explanation_of(job.job, *_of_tasks(state, job, cause))


def failing_places(state: ClusterState, job: ClusterJob) -> Cause | None:
    """Places where a process of this job ended again and again. Other jobs may have them by now."""
    start = (job.job, job.epoch)
    found = [
        f"{kind} {member} on {place.host}: {trouble}"
        for (kind, member), place in state.members.items()
        if (trouble := state.unfit.get((kind, member), {}).get(start))
    ]
    if not found:
        return None
    return Cause(
        code=Code.PROCESSES_FAIL,
        summary=f"{len(found)} processes of job {job.job} ended again and again and were given up.",
        details=tuple(found[:SHOWN]),
        hints=("read logs/<job>/<member>-*.log in the host agent's data folder", f"trireme cancel {job.job}"),
    )


def _of_tasks(state: ClusterState, job: ClusterJob, cause: Cause) -> list[Cause]:
    """`cause`, and what pre- and post-tasks have to do with it, the most important one first."""
    runs = state.task_runs.get(job.job, {})
    bad = [
        Cause(
            code=Code.JOB_TASK_FAILED,
            summary=f"The {spoken(run.name)} of job {job.job} failed {run.failures} times: {run.reason}.",
            details=tuple(run.output.splitlines()[-SHOWN:]),
            hints=(
                f"trireme job-tasks {job.job} {run.name}",
                f"trireme resume {job.job}, if the job is FAILED",
            ),
        )
        for run in failed_tasks(runs)
    ]
    open_ones = [run_of(job, runs, name) for name in unfinished_tasks(job, runs)]
    if job.standing is Standing.FAILED and failed_tasks(runs, "pre"):
        return [*bad, cause]
    if not open_ones or cause.code in (Code.WAITS_FOR_TIME, Code.WAITS_FOR_JOBS):
        return [cause, *bad]
    run = open_ones[0]
    what = {
        TaskState.RUNNING: f"runs on {run.member}, attempt {run.attempt}",
        TaskState.WAITING: f"is tried again: {run.reason}" if run.reason else "waits for an idle trainer",
    }
    waits = Cause(
        code=Code.JOB_TASK_UNFINISHED,
        summary=f"The {spoken(run.name)} of job {job.job} {what[run.state]}.",
        details=(
            f"It runs {job.spec.named_tasks[run.name].text[:200]!r}, since {run.start_time or 'not yet'}.",
        ),
        hints=(f"trireme job-tasks {job.job}", f"trireme cancel {job.job}"),
    )
    return [waits, *bad] if job.standing is Standing.QUEUED else [cause, waits, *bad]


def _cause(state: ClusterState, job: ClusterJob, wall_time: float) -> Cause:
    name = job.job
    match job.standing:
        case Standing.QUEUED:
            return _queued(state, job, wall_time)
        case Standing.ACTIVE if job.wanted != "run" or job.preempted_by:
            return Cause(
                code=Code.JOB_STOPPING,
                summary=f"Job {name} is being stopped: {_why_stopped(job)}.",
                details=("It saves a checkpoint first, if it trains.",),
                hints=("wait",),
            )
        case Standing.ACTIVE:
            return Cause(
                code=Code.MASTER_TAKING_OVER,
                summary=f"Job {name} has its members, and its master begins.",
                hints=("wait: it takes less than a second",),
            )
        case Standing.PAUSED:
            return Cause(
                code=Code.JOB_PAUSED,
                summary=f"Job {name} is PAUSED: {job.reason}.",
                details=("Its checkpoints are kept, and it has no members.",),
                hints=(f"trireme resume {name}", f"trireme cancel {name}"),
            )
        case Standing.CANCELLED:
            return Cause(
                code=Code.JOB_CANCELLED,
                summary=f"Job {name} was CANCELLED: {job.reason}.",
                hints=(f"trireme delete {name} frees its name and its files",),
            )
        case Standing.COMPLETED:
            return Cause(code=Code.JOB_COMPLETED, summary=f"Job {name} is COMPLETED: {job.reason}.")
        case Standing.UNREADABLE:
            return Cause(
                code=Code.JOB_UNREADABLE,
                summary=f"The leader's version of Trireme cannot read job {name}, and leaves it alone.",
                details=(job.reason,),
                hints=("start the version that wrote it (docs/upgrades.md)", f"trireme delete {name}"),
            )
        case Standing.FAILED:
            return Cause(
                code=Code.JOB_FAILED,
                summary=f"Job {name} has FAILED: {job.reason}",
                hints=(f"trireme resume {name}, if its script is not the cause", f"trireme delete {name}"),
            )


def _why_stopped(job: ClusterJob) -> str:
    asked = {"pause": "its user pauses it", "cancel": "its user cancels it"}
    return asked.get(job.wanted, f"job {job.preempted_by} needs its members")


def _queued(state: ClusterState, job: ClusterJob, wall_time: float) -> Cause:
    name, wanted = job.job, job.scheduling
    if wanted.not_before_time and (left_s := instant(wanted.not_before_time) - wall_time) > 0:
        return Cause(
            code=Code.WAITS_FOR_TIME,
            summary=f"Job {name} starts at {wanted.not_before_time} or later, in {left_s:.0f} s.",
            hints=("wait", f"trireme cancel {name}"),
        )
    before = [state.jobs[other] for other in wanted.after if other in state.jobs] if job.epoch == 0 else []
    if waits := [other for other in before if not other.standing.final]:
        return Cause(
            code=Code.WAITS_FOR_JOBS,
            summary=f"Job {name} starts once {waits[0].job} is COMPLETED; that one is {waits[0].standing}.",
            details=tuple(
                f"job {each.job} is {each.standing}: {each.reason}" for each in waits[:SHOWN] if each.reason
            ),
            hints=(f"trireme explain {waits[0].job}", f"trireme cancel {name}"),
        )
    servers = f"{in_words('pserver', job.pservers_wanted)} and " if job.pservers_wanted else ""
    least = in_words("trainer", job.least_trainers)
    needs = f"It needs {servers}at least {least}, all at once; its priority is {wanted.priority}."
    return Cause(
        code=Code.WAITS_FOR_MEMBERS,
        summary=f"Job {name} {job.reason}.",
        details=(
            needs,
            *([_pool(state, "pserver")] if job.pservers_wanted else []),
            _pool(state, "trainer"),
        ),
        hints=(
            "wait for a job to end",
            "more members: TRIREME_ETCD=URL TRIREME_TRAINERS=N TRIREME_PSERVERS=M python -m trireme.host",
            f"cancel {name} and submit it with a higher --priority",
        ),
    )


def _pool(state: ClusterState, kind: Kind) -> str:
    places = [place for place in state.members if place[0] == kind]
    held = [state.assignments[place].job for place in places if place in state.assignments]
    of = ", ".join(f"{name} has {held.count(name)}" for name in sorted(set(held))[:SHOWN])
    return (
        f"The pool has {in_words(kind, len(places))}, {len(places) - len(held)} not "
        f"assigned{f' ({of})' if of else ''}."
    )

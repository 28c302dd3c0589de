"""What the pre- and post-tasks of a job stand at, by its record and their runs."""

from __future__ import annotations

from collections.abc import Mapping

from trireme_shared.protocol.records.cluster import Assignment, ClusterJob, PoolMember, Standing, TaskRun, TaskState

Runs = Mapping[str, TaskRun]


def is_wanted(job: ClusterJob, name: str) -> bool:
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


def unfinished(job: ClusterJob, runs: Runs) -> list[str]:
    """Names of the tasks that may run now and are not over, in their order."""
    if not (job.spec.pre_tasks or job.spec.post_tasks):
        return []
    return [
        name for name in job.spec.named_tasks if is_wanted(job, name) and not (name in runs and runs[name].state.over)
    ]


def failed(runs: Runs, stage: str = "") -> list[TaskRun]:
    """`stage`: pre or post; "": both."""
    found = (run for _, run in sorted(runs.items()) if run.name.startswith(stage))
    return [run for run in found if run.state is TaskState.FAILED]


def run_of(job: ClusterJob, runs: Runs, name: str) -> TaskRun:
    """As it was written last; of one that was never begun: WAITING."""
    return runs.get(name) or TaskRun(job=job.job, name=name)

"""Failures that trainers reported: a model that is not the job's, a script that cannot start, tasks on which the script fails."""

from __future__ import annotations

from master_service.core.explanation.cause import Cause, Code
from master_service.core.explanation.situation import NAMED, Reported, Situation, seconds
from trireme_shared.protocol.errors import InvalidArgument, LayoutMismatch

RECENT_S = 300.0  # an older failure no longer explains the present

_REFUSED = {LayoutMismatch.code, InvalidArgument.code}


def refusals(now: Situation) -> Cause | None:
    """Trainers whose model, device or settings are not the job's."""
    found = [each for each in _outside(now) if each.failure.error_type in _REFUSED]
    if not found:
        return None
    names = list(dict.fromkeys(each.failure.trainer for each in found))
    return Cause(
        code=Code.TRAINER_REFUSED,
        summary=f"{now.named(names)} came and may not join: {_shortly(found[-1])}",
        details=(*_told(found), "Another model does not count against the job while others train.", _budget(now)),
        hints=(
            "give every trainer the same script, packages and device, or start a new job with --job NAME",
            f"trireme members {now.option}",
        ),
    )


def start_failures(now: Situation) -> Cause | None:
    """The script raises outside of tasks, for example where it builds the model."""
    found = [each for each in _outside(now) if each.failure.error_type not in _REFUSED]
    if not found:
        return None
    return Cause(
        code=Code.USER_CODE_FAILS,
        summary=f"The script fails at {found[-1].failure.trainer}: {_shortly(found[-1])}",
        details=(*_told(found), _budget(now)),
        hints=("correct the script and start the job again", "read logs/trainer-*.log of the run"),
    )


def failing_tasks(now: Situation) -> Cause | None:
    """Tasks that have failed and are tried again."""
    queue = now.job.due
    if queue is None:
        return None
    last = {each.task_id: each for each in now.reported if each.task_id}
    failing = {task_id: back.failures for task_id, back in queue.requeued.items() if back.failures}
    failing |= {task_id: held.record.failures for task_id, held in queue.pending.items() if held.record.failures}
    if not failing:
        return None
    limit = queue.max_failures
    worst = sorted(failing, key=lambda task_id: -failing[task_id])

    def error(task_id: str) -> str:
        if (back := queue.requeued.get(task_id)) is not None:
            return back.cause
        return _shortly(last[task_id]) if task_id in last else "its error is in the log of the trainer that had it"

    details = [
        f"{queue.streams.describe(task_id)} has failed {failing[task_id]} of {limit} times: {error(task_id)}"
        for task_id in worst[:NAMED]
    ]
    details.append(f"After {limit} failures (max_task_failures) a task is discarded, and training goes on without it.")
    return Cause(
        code=Code.USER_CODE_FAILS,
        summary=f"{len(failing)} task{'s' if len(failing) > 1 else ''} failed and will be tried again; "
        f"the script raises: {error(worst[0])}",
        details=tuple(details),
        hints=(f"trireme tasks --state requeued {now.option}", "correct the script or the records, then start again"),
    )


def _outside(now: Situation) -> list[Reported]:
    return [each for each in now.reported if not each.task_id and each.ago_s <= RECENT_S]


def _told(found: list[Reported]) -> list[str]:
    return [
        f"{each.failure.trainer}, {seconds(each.ago_s)} ago"
        + (f", in {each.failure.task}" if each.failure.task else "")
        + f": {each.failure.error_type}: {each.failure.message}"
        for each in found[-NAMED:]
    ]


def _budget(now: Situation) -> str:
    budget = now.job.budget
    return f"{budget.counts.total} of max_user_failures {budget.allowed} are counted; then the job fails."


def _shortly(each: Reported) -> str:
    return f"{each.failure.error_type}: {each.failure.message}"

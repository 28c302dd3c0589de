"""What a trainer says of the tasks that it has, so that the master knows that it works on them."""

from __future__ import annotations

from typing import NamedTuple

from shared.records import Task

PROGRESS_S, LEAST_PROGRESS_S = 5.0, 0.25


class Held(NamedTuple):
    """A task, how many of its minibatches are done, and `work`: see TaskProgress."""

    task: Task
    minibatches: int
    work: int = 0


def progress_every_s(task_timeout_floor_s: float) -> float:
    """Several times before a task may be late."""
    return max(LEAST_PROGRESS_S, min(PROGRESS_S, task_timeout_floor_s / 4))

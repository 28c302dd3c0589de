"""The dataset of training in one process: counted, cut into tasks, and what the user should know of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from master_service.core.queue.epoch_plan import news_of, plan_of
from master_service.core.queue.file_table import FileTable
from master_service.core.queue.streams import Streams
from master_service.core.queue.task_sizes import TaskSizes
from master_service.storage.counting import count_records
from shared.records import JobSpec, TaskKind


class Counted(NamedTuple):
    """`steps`: of an epoch."""

    table: FileTable
    steps: int


def count(spec: JobSpec, report: Callable[[str], object]) -> Counted:
    """Of a job with one lane. Raises DatasetError."""
    table = count_records(spec.dataset, TaskSizes.of(spec), seed=spec.seed)
    plan = plan_of(spec, Streams(TaskKind.TRAIN, table, 1, spec.seed, spec.shuffle, spec.minibatch_size))
    for event in news_of(spec, table, plan):
        report(event.message)
    assert plan.steps is not None
    return Counted(table, plan.steps)

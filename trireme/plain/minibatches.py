"""The dataset of plain training: counted, and its minibatches in the order in which a job with one lane trains them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from master_service.core.queue.file_table import FileTable, TaskSizes
from master_service.core.queue.streams import EpochOrder, Streams, news_of, plan_of
from master_service.storage.counting import count_records
from trainer_agent.data import Blaming, Minibatch, default_collate, minibatch_indices, minibatches_in, open_dataset
from trainer_agent.data.in_code import reading
from trainer_agent.data.reader import blaming
from trainer_agent.model.devices import on_device
from trainer_agent.script.user_module import UserModule
from trireme_shared.protocol.records import JobSpec, TaskKind


class Counted(NamedTuple):
    """A dataset whose records were counted."""

    table: FileTable
    #: How many steps an epoch has.
    steps: int


def count(spec: JobSpec, report: Callable[[str], object]) -> Counted:
    """Count the dataset of a job with one lane; `report` gets what the user should know of it. Raises DatasetError."""
    table = count_records(spec.dataset, TaskSizes.of(spec), seed=spec.seed)
    plan = plan_of(spec, Streams(TaskKind.TRAIN, table, 1, spec.seed, spec.shuffle, spec.minibatch_size))
    for event in news_of(spec, table, plan):
        report(event.message)
    assert plan.steps is not None
    return Counted(table, plan.steps)


def epoch_minibatches(
    spec: JobSpec, table: FileTable, epoch: int, reader: Blaming | None = None, *, by_columns: bool = False
) -> Iterator[Minibatch]:
    """All minibatches of an epoch, in the order in which the only lane trains them. `reader`: of the dataset, to use it for
    several epochs. `by_columns`: nobody asks for records one by one."""
    reader = reader or open_dataset(spec.dataset, spec.seed)
    order = EpochOrder(table.tasks, spec.seed, epoch, spec.shuffle)
    for position in range(table.tasks):
        task = order.task_at(position)
        place = table.locate(task)
        with reading(epoch):
            shard = reader.read(place.file, place.first, place.count, place.offset, place.stamp)
        if by_columns:
            shard.keep_columns()
        for number in range(minibatches_in(place.count, spec.minibatch_size)):
            yield shard.minibatch(
                minibatch_indices(
                    spec.seed, epoch, task, place.count, spec.minibatch_size, number, shuffle=spec.shuffle
                )
            )


def batch_of(user: UserModule, minibatch: Minibatch, device: torch.device) -> Any:
    """What the script's loss gets."""
    if user.has("collate"):
        batch = user.call("collate", list(minibatch))
    else:
        with blaming("the minibatch:", 0, len(minibatch)):
            batch = default_collate(minibatch)
    return batch if device.type == "cpu" else on_device(batch, device)

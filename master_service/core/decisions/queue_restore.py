"""The queue of an asynchronous job as it stood at a checkpoint's cut: back to it, and what was done since.

manifest.queue --at_cut--> CutQueue --rewinding--> changes for the books        --missed--> minibatches a pserver lacks
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from master_service.core.decisions.rollback import CAUSE, from_the_start, put_back
from master_service.core.state.changes import (
    Change,
    DropDiscarded,
    NextEpoch,
    PutCursor,
    PutDiscarded,
    PutLosses,
    PutRequeued,
    PutSums,
)
from master_service.core.state.job import Job
from shared.errors import CheckpointUnusable
from shared.records import DiscardedTask, EvaluationSums, PendingTask, RequeuedTask, TaskKind, TaskMeta
from shared.records.pauses import Losses


@dataclass(frozen=True, slots=True)
class CutQueue:
    """Of training. `open`: what was pending or requeued, as it is given again; `discarded`: by (epoch, task)."""

    epoch: int
    cursor: int
    open: Mapping[str, RequeuedTask]
    discarded: Mapping[tuple[int, str], DiscardedTask]
    losses: Losses


def at_cut(queue: Mapping[str, str]) -> CutQueue:
    """From names below `tasks/` and their values. Raises CheckpointUnusable."""
    try:
        meta = TaskMeta.model_validate_json(queue["meta"])
        again: dict[str, RequeuedTask] = {}
        discarded: dict[tuple[int, str], DiscardedTask] = {}
        for name, value in sorted(queue.items()):
            kind, _, task_id = name.partition("/")
            if kind == "discarded" and (task_id := task_id.partition("@")[0]).isdigit():
                lost = DiscardedTask.model_validate_json(value)
                discarded[lost.epoch, task_id] = lost
            elif kind == "requeued" and task_id.isdigit():
                again[task_id] = RequeuedTask.model_validate_json(value)
            elif kind == "pending" and task_id.isdigit():
                again[task_id] = _back(PendingTask.model_validate_json(value))
        losses = Losses.model_validate_json(queue.get("losses", "{}"))
        return CutQueue(meta.epoch, int(queue.get("cursor/0", "0")), again, discarded, losses)
    except (KeyError, ValueError) as error:
        msg = f"the queue in the checkpoint's manifest cannot be read: {error!r}"
        raise CheckpointUnusable(msg, hint="the one before it is taken if there is one") from error


def _back(held: PendingTask) -> RequeuedTask:
    return RequeuedTask(
        attempts=held.attempt,
        failures=held.failures,
        cause=CAUSE,
        stream=held.stream,
        epoch=held.epoch,
        index=held.index,
    )


def rewinding(job: Job, cut: CutQueue) -> tuple[Change, ...]:
    """After NextEpoch(cut.epoch): what brings the books to the cut. Idempotent; any number of changes."""
    changes: list[Change] = [PutLosses(cut.losses)]
    queue = job.training
    if cut.epoch < job.spec.epochs:
        if cut.cursor:
            changes.append(PutCursor(queue.streams.name(0), cut.cursor))
        changes += [PutRequeued(task_id, back) for task_id, back in cut.open.items()]
        for kind, other in job.queues.items():
            if kind is not TaskKind.TRAIN:
                changes += from_the_start(other)
        if job.sums != EvaluationSums():
            changes.append(PutSums(EvaluationSums()))
    else:
        for kind, other in job.queues.items():
            if kind is not TaskKind.TRAIN:
                changes += put_back(other)
    changes += [
        DropDiscarded(task_id, epoch) for epoch, task_id in queue.discarded if (epoch, task_id) not in cut.discarded
    ]
    changes += [
        PutDiscarded(task_id, lost, queue.streams.records_of(task_id))
        for (epoch, task_id), lost in cut.discarded.items()
        if (epoch, task_id) not in queue.discarded
    ]
    return tuple(changes)


def clear(cut: CutQueue) -> tuple[Change, ...]:
    return (NextEpoch(cut.epoch),)


# -------------------------------------------------------------------- what was done since


def done_since(job: Job, cut: CutQueue) -> Iterator[tuple[int, str]]:
    """(epoch, task) of all that are done now and were not at the cut; as many as were trained since."""
    queue = job.training
    for epoch in range(cut.epoch, min(queue.epoch + 1, job.spec.epochs)):
        first = cut.cursor if epoch == cut.epoch else 0
        last = queue.cursors.get(queue.streams.name(0), 0) if epoch == queue.epoch else queue.total
        given = [queue.streams.at(epoch, 0, index) for index in range(first, last)]
        if epoch == cut.epoch:
            given = [*cut.open, *given]
        for task_id in given:
            under_way = epoch == queue.epoch and (task_id in queue.pending or task_id in queue.requeued)
            if not under_way and (epoch, task_id) not in queue.discarded:
                yield epoch, task_id


def missed(job: Job, cut: CutQueue, positions: Mapping[str, int]) -> int:
    """Minibatches of tasks that are done which a pserver lacks that came back from this cut. `positions`: of the tasks
    that were open there, what its ledger has (-1: all). Tasks that are open now resume at its ledger and lose nothing."""
    total = 0
    for epoch, task_id in done_since(job, cut):
        had = positions.get(task_id, 0) if epoch == cut.epoch else 0
        if had >= 0:
            total += max(0, minibatches_of(job, task_id) - had)
    return total


def records_since(job: Job, cut: CutQueue) -> int:
    """Records of tasks that are done now and are trained again if the job goes back to the cut."""
    return sum(job.training.streams.records_of(task_id) for _, task_id in done_since(job, cut))


def minibatches_of(job: Job, task_id: str) -> int:
    return -(-job.training.streams.records_of(task_id) // job.spec.minibatch_size)

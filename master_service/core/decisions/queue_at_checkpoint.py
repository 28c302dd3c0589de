"""The task queue goes back to where it stood at a checkpoint; and how much was done since then.

synchronous    manifest.positions (of each lane) --restore_to_positions--> changes of the job
asynchronous   manifest.queue --read_cut--> CutQueue --restore_to_cut--> changes of the job
               CutQueue --missed_minibatches--> what a pserver lacks that loaded this checkpoint

`NextEpoch(epoch of the checkpoint)` is applied first; the changes follow. They are idempotent: if a master
dies halfway, its successor does them again. There may be any number of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from master_service.core.changes import (
    Change,
    DropDiscarded,
    PutCursor,
    PutDiscarded,
    PutRequeued,
    RestartQueue,
)
from master_service.core.queue.open_tasks import requeued_task
from master_service.core.queue.task_queue import TaskQueue
from master_service.core.state.job import BESIDE, Job
from trireme_shared.protocol.errors import CheckpointUnusable
from trireme_shared.protocol.records import (
    DiscardedTask,
    EvaluationSums,
    PendingTask,
    RequeuedTask,
    SlotMap,
    TaskKind,
    TaskMeta,
)
from trireme_shared.protocol.records.assignments import slot_of
from trireme_shared.protocol.records.checkpoints import Manifest
from trireme_shared.protocol.records.job import Losses
from trireme_shared.protocol.records.step import LanePosition

CAUSE = "the job went back to a checkpoint"

# -------------------------------------------------------------------- asynchronous: the queue at the cut


@dataclass(frozen=True, slots=True)
class CutQueue:
    """The training queue at a cut. `open`: tasks that were pending or requeued, to be given again;
    `discarded`: by (epoch, task)."""

    epoch: int
    cursor: int
    open: Mapping[str, RequeuedTask]
    discarded: Mapping[tuple[int, str], DiscardedTask]
    losses: Losses


def cut_in(manifest: Manifest, slots: SlotMap | None) -> CutQueue:
    """The queue in a manifest, with losses by the parameter servers of `slots`. Raises CheckpointUnusable."""
    cut = read_cut(manifest.queue)
    return cut if slots is None else replace(cut, losses=moved_losses(cut.losses, manifest, slots))


def moved_losses(losses: Losses, manifest: Manifest, slots: SlotMap) -> Losses:
    """Of other parameter servers than at the cut: each lacks at most what all together lacked that had some
    of its blocks, or rows of its slots."""
    owners = manifest.slots.owners
    if owners == slots.owners or losses == Losses():
        return losses
    before: dict[int, set[str]] = defaultdict(set)
    filled = (slot_of(block.number, manifest.layout.slot_count) for block in manifest.layout.blocks())
    for slot in range(manifest.layout.slot_count) if manifest.layout.tables else filled:
        before[slots.owners[slot]].add(str(owners[slot]))
    moved = Losses()
    for index, former in sorted(before.items()):
        lost, skipped = (sum(counts.get(i, 0) for i in former) for counts in (losses.lost, losses.skipped))
        moved = moved.with_lost(index, lost, skipped)
    return moved


def read_cut(queue: Mapping[str, str]) -> CutQueue:
    """`queue`: names below `tasks/` and their values. Raises CheckpointUnusable."""
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
                held = PendingTask.model_validate_json(value)
                again[task_id] = requeued_task(held, held.failures, CAUSE)
        losses = Losses.model_validate_json(queue.get("losses", "{}"))
        return CutQueue(meta.epoch, int(queue.get("cursor/0", "0")), again, discarded, losses)
    except (KeyError, ValueError) as error:
        msg = f"the queue in the checkpoint's manifest cannot be read: {error!r}"
        raise CheckpointUnusable(msg, hint="the one before it is taken if there is one") from error


def restore_to_cut(job: Job, cut: CutQueue) -> tuple[Change, ...]:
    """After NextEpoch(cut.epoch): each task that is not done at the cut is given out again, exactly once."""
    changes: list[Change] = [cut.losses]
    queue = job.training
    again = cut.epoch < job.spec.epochs
    if again:
        if cut.cursor:
            changes.append(PutCursor(queue.streams.name(0), cut.cursor))
        changes += [PutRequeued(task_id, back) for task_id, back in cut.open.items()]
    changes += _restore_others(job, again=again)
    changes += [
        DropDiscarded(task_id, epoch)
        for epoch, task_id in queue.discarded
        if (epoch, task_id) not in cut.discarded
    ]
    changes += [
        PutDiscarded(task_id, lost, queue.streams.records_of(task_id))
        for (epoch, task_id), lost in cut.discarded.items()
        if (epoch, task_id) not in queue.discarded
    ]
    return tuple(changes)


def missed_minibatches(job: Job, cut: CutQueue, positions: Mapping[str, int]) -> int:
    """Minibatches of done tasks that a pserver lacks which loaded this cut.

    `positions`: what its ledger has of each task that was open at the cut, in minibatches (-1: all). Tasks
    that are open now go on from its ledger and lose nothing.
    """
    streams, size = job.training.streams, job.spec.minibatch_size

    def minibatches(records: int) -> int:
        return -(-records // size)

    def lacks(task_id: str) -> int:
        had = positions.get(task_id, 0)
        return max(0, minibatches(streams.records_of(task_id)) - had) if had >= 0 else 0

    return _done_since(job, cut, minibatches, lacks)


def records_since_cut(job: Job, cut: CutQueue) -> int:
    """Records of tasks that are done now and will be trained again if the job goes back to the cut."""
    return _done_since(job, cut, lambda records: records, job.training.streams.records_of)


def _done_since(
    job: Job, cut: CutQueue, weight: Callable[[int], int], weight_of_open: Callable[[str], int]
) -> int:
    """The sum of `weight(records)` over all tasks that are done now and were not given out at the cut, and of
    `weight_of_open(task)` over those that are done now and were open or discarded then. Tasks are not counted
    one by one: a job of 1e9 records has many."""
    queue = job.training
    streams, total = queue.streams, 0
    for epoch in range(cut.epoch, min(queue.epoch + 1, job.spec.epochs)):
        first = cut.cursor if epoch == cut.epoch else 0
        last = queue.cursors.get(streams.name(0), 0) if epoch == queue.epoch else queue.total
        total += streams.sum(epoch, first, last, weight)
        not_done = {task_id for gone_in, task_id in queue.discarded if gone_in == epoch}
        if epoch == queue.epoch:
            not_done |= queue.pending.keys() | queue.requeued.keys()
        total -= sum(
            weight(streams.records_of(task_id))
            for task_id in not_done
            if first <= streams.place(epoch, task_id)[1] < last
        )
        if epoch == cut.epoch:
            tried_again = {task_id for gone_in, task_id in cut.discarded if gone_in == epoch}
            total += sum(
                weight_of_open(task_id)
                for task_id in cut.open.keys() | tried_again
                if task_id not in not_done
            )
    return total


# -------------------------------------------------------------------- synchronous: lane positions


def epoch_at(positions: Sequence[LanePosition]) -> int:
    """The current epoch after a version with these positions. All lanes are in the same epoch."""
    return positions[0].epoch + all(position.exhausted for position in positions)


def restore_to_positions(job: Job, positions: Sequence[LanePosition]) -> tuple[Change, ...]:
    """After NextEpoch(epoch_at(positions)): each record of the epoch that the positions have not consumed is
    given out again, exactly once. Works from any state of the queue."""
    again = epoch_at(positions) < job.spec.epochs
    return *_restore_training(job.training, positions), *_restore_others(job, again=again)


def records_since_positions(job: Job, positions: Sequence[LanePosition]) -> int:
    """About how many records are done now and were not done at the checkpoint. Whole tasks only."""
    queue = job.training
    streams, epochs = queue.streams, queue.epoch - positions[0].epoch
    tasks = -len(queue.pending) - len(queue.requeued)
    tasks -= sum(lost.task.epoch >= positions[0].epoch for lost in queue.discarded.values())
    for position in positions:
        at = streams.length(position.lane) if position.exhausted else position.index
        tasks += (
            epochs * streams.length(position.lane) + queue.cursors.get(streams.name(position.lane), 0) - at
        )
    return max(0, round(tasks * streams.records / streams.total))


# -------------------------------------------------------------------- parts


def _restore_others(job: Job, *, again: bool) -> Iterator[Change]:
    """The other queues: they start over if training goes on (`again`), else only their pending tasks are put
    back."""
    for kind, queue in job.queues.items():
        if kind is not TaskKind.TRAIN and kind not in BESIDE:  # those are rewound with their evaluation
            touched = queue.dispatched or queue.pending or queue.requeued or queue.discarded
            if again and touched:
                yield RestartQueue(kind)
            elif not again:
                yield from _put_back(queue)
    if again and job.sums != EvaluationSums():
        yield EvaluationSums()


def _put_back(queue: TaskQueue) -> Iterator[Change]:
    for task_id in queue.pending:
        yield from queue.put_back(task_id, CAUSE)


def _restore_training(queue: TaskQueue, positions: Sequence[LanePosition]) -> Iterator[Change]:
    """Cursors say which tasks are done. A task that is done in part is given again: it is requeued.

    A task that was discarded since stays discarded: it would fail again, and the same step might be torn
    again.
    """
    epoch, streams = epoch_at(positions), queue.streams
    consumed = {p.lane: streams.length(p.lane) if p.exhausted else p.index for p in positions}
    if epoch == positions[0].epoch:
        for position in positions:
            partly = position.offset > 0 and not position.exhausted
            if cursor := consumed[position.lane] + partly:
                yield PutCursor(streams.name(position.lane), cursor)
            task_id = streams.at(epoch, position.lane, position.index) if partly else ""
            if partly and (epoch, task_id) not in queue.discarded:
                name = streams.name(position.lane)
                back = RequeuedTask(
                    attempts=1, failures=0, cause=CAUSE, stream=name, epoch=epoch, index=position.index
                )
                yield PutRequeued(task_id, back)

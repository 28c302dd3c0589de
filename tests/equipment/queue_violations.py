"""What must hold of a task queue at any time."""

from __future__ import annotations

from collections.abc import Iterator

from master_service.core.queue.task_queue import TaskQueue
from trireme_shared.protocol.records import TaskKind


def violations(queue: TaskQueue) -> Iterator[str]:
    """Broken invariants, one a line."""
    for task_id, held in queue.pending.items():
        if task_id in queue.requeued:
            yield f"task {task_id} is pending and requeued"
        if held.record.epoch != queue.epoch:
            yield (
                f"task {task_id} is pending in epoch {held.record.epoch} while epoch {queue.epoch} is "
                "under way"
            )
    for task_id in (*queue.pending, *queue.requeued):
        stream, index = queue.streams.place(queue.current, task_id)
        if index >= queue.cursors.get(queue.streams.name(stream), 0):
            yield f"task {task_id} is under way beyond the cursor of stream {stream}"
        if (queue.epoch, task_id) in queue.discarded:
            yield f"task {task_id} is under way and discarded"
    asks = {
        (each.trainer, each.request): task_id
        for task_id, p in queue.pending.items()
        for each in p.record.attempts
        if each.request
    }
    if asks != queue.repeats.asks:
        yield f"pending tasks were asked for as {asks}, remembered is {queue.repeats.asks}"
    streams = [p.record.stream for p in queue.pending.values()] + [
        back.stream for back in queue.requeued.values()
    ]
    if queue.by_lane and sorted(streams) != sorted(name for name, ids in queue.open_of.items() for _ in ids):
        yield f"open tasks are of lanes {sorted(streams)}, noted are {queue.open_of}"
    if queue.dispatched != sum(queue.cursors.values()):
        yield (
            f"{queue.dispatched} tasks are counted as dispatched, the cursors say "
            f"{sum(queue.cursors.values())}"
        )
    if min(queue.counts) < 0 or sum(queue.counts) != queue.total:
        yield f"counts {queue.counts} do not add up to {queue.total}"
    if queue.kind is TaskKind.TRAIN and queue.epoch < queue.epochs and queue.closed:
        yield f"epoch {queue.epoch} is closed but did not advance"

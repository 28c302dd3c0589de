"""Tasks that are given out or put back, found without a look at all of them: the next one to give again, and those of one lane."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from trireme_shared.protocol.records import PendingTask, RequeuedTask

SLACK = 64


@dataclass(slots=True)
class Pending:
    """`record` is what etcd holds; the rest starts anew in a new master. `since`: when the newest attempt was given out; `late`: it
    was found late since then; `minibatches`, `work`, `waits_for`: what its trainer said last."""

    record: PendingTask
    deadline: float
    last_sign: float
    since: float
    minibatches: int = 0
    work: int = 0
    late: bool = False
    waits_for: str = ""

    def does_more(self, minibatches: int, work: int) -> bool:
        """In place. Whether more is done than its trainer said before."""
        more = minibatches > self.minibatches or work > self.work
        self.minibatches, self.work = max(self.minibatches, minibatches), max(self.work, work)
        return more


class RequeuedTasks(dict[str, RequeuedTask]):
    """By task id. `first` is the one that comes first in the epoch, however many there are."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, str]] = []  # also of tasks that are not requeued any more; `first` drops those

    def __setitem__(self, task_id: str, back: RequeuedTask) -> None:
        super().__setitem__(task_id, back)
        heapq.heappush(self._heap, (back.index, task_id))
        if len(self._heap) > SLACK + 2 * len(self):
            self._heap = sorted((each.index, name) for name, each in self.items())

    def first(self) -> tuple[str, RequeuedTask]:
        """Raises IndexError if there is none."""
        while True:
            index, task_id = self._heap[0]
            back = self.get(task_id)
            if back is not None and back.index == index:
                return task_id, back
            heapq.heappop(self._heap)

    def copy(self) -> RequeuedTasks:
        same = RequeuedTasks()
        same.update(self)
        same._heap = self._heap.copy()
        return same


class OpenOfStreams(dict[str, tuple[str, ...]]):
    """The pending and requeued tasks of each stream, in the order in which they became so. The values are never changed in place,
    so a copy is independent."""

    def note(self, stream: str, task_id: str, *, is_open: bool) -> None:
        """In place."""
        found = self.get(stream, ())
        if is_open == (task_id in found):
            return
        self[stream] = (*found, task_id) if is_open else tuple(other for other in found if other != task_id)

    def copy(self) -> OpenOfStreams:
        return OpenOfStreams(self)


def requeued_task(held: PendingTask, failures: int, cause: str) -> RequeuedTask:
    stream, epoch, index = held.stream, held.epoch, held.index
    return RequeuedTask(attempts=held.attempt, failures=failures, cause=cause, stream=stream, epoch=epoch, index=index)

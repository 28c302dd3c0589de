"""What a queue keeps of tasks that are under way: those that are given out or put back, how long each may be
silent (Deadlines), which are late (LateTasks), and which requests and reports were taken before (Repeats).

Only `Pending.record` and the requeued tasks are stored; a new leader measures everything else again.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from trireme_shared.protocol.records import Attempt, PendingTask, RequeuedTask, TrainerList

SLACK = 64


@dataclass(slots=True)
class Pending:
    """`record` is what etcd holds; the rest starts anew in a new master. `since`: when the newest attempt was
    given out; `late`: it was found late since then; `minibatches`, `work`, `waits_for`: what its trainer said
    last."""

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
        # also of tasks that are not requeued any more; `first` drops those
        self._heap: list[tuple[int, str]] = []

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
    """The pending and requeued tasks of each stream, in the order in which they became so. The values are
    never changed in place, so a copy is independent."""

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
    return RequeuedTask(
        attempts=held.attempt, failures=failures, cause=cause, stream=stream, epoch=epoch, index=index
    )


WINDOW = 512
ENOUGH = 8
QUANTILE = 0.99
FACTOR = 4.0


@dataclass(slots=True)
class Deadlines:
    """How long a task may be silent: a high quantile of the observed silences, times a factor, between a
    floor and a ceiling.

    A silence is the time between two signs of life of one attempt: dispatch, each progress report,
    completion. That the first minibatch of a lane's task is handed out tells nothing: its step is still to
    come. A trainer computes its lanes one after the other, so silences count for each of its lanes: who gets
    the lanes of others may be silent for longer. The ceiling is that of a minibatch, and all wait for the
    trainer with the most lanes, so everybody's counts for each of those. Otherwise a trainer that is left
    alone with many lanes would be evicted in every step, for ever, although no minibatch takes that long.

    `trainers`: who has which lanes.
    """

    floor_s: float
    ceiling_s: float
    trainers: TrainerList = field(default_factory=TrainerList)
    _seen: deque[float] = field(default_factory=deque)
    _ordered: list[float] = field(default_factory=list)

    def heard(self, held: Pending, now: float, *, by_lane: bool) -> None:
        """In place: more minibatches of a task were handed out. Before `held` says so."""
        if held.minibatches or not by_lane:
            self.observe(now - held.last_sign, held.record.trainer)

    def observe(self, silence_s: float, trainer: str = "") -> None:
        """In place, of a task at that trainer. The last WINDOW silences count."""
        silence_s /= self._lanes_of(trainer)
        if len(self._seen) == WINDOW:
            del self._ordered[bisect_left(self._ordered, self._seen.popleft())]
        self._seen.append(silence_s)
        insort(self._ordered, silence_s)

    def allowed_s(self, trainer: str = "") -> float:
        """At that trainer. The longest until ENOUGH silences were observed: a first batch may compile,
        download, warm up."""
        count, longest_s = len(self._ordered), self.ceiling_s * max(1, self.trainers.most_lanes)
        if count < ENOUGH:
            return longest_s
        high = self._ordered[min(count - 1, int(QUANTILE * count))]
        return min(longest_s, max(self.floor_s, FACTOR * high * self._lanes_of(trainer)))

    def is_over(self, held: Pending, now: float) -> bool:
        """Whether that task has been silent for too long, also if its trainer has got more lanes since the
        deadline was set."""
        return held.deadline < now and held.last_sign + self.allowed_s(held.record.trainer) < now

    def _lanes_of(self, trainer: str) -> int:
        """1 if it has none any more, and where tasks belong to no lanes."""
        first, end = self.trainers.lanes_of(trainer)
        return max(1, end - first)


DURATIONS = 64
ENOUGH_DURATIONS = 3
LEAST_S = 1.0
"""Shorter tasks are not worth a second trainer, and leaders look once a second."""


@dataclass(slots=True)
class LateTasks:
    """Tasks that take longer than the usual, while nothing else is left to give: they are given to another
    trainer too.

    `durations`: seconds from dispatch to completion of the last tasks. `found`: those that were late, the
    longest first.
    """

    durations: deque[float] = field(default_factory=lambda: deque(maxlen=DURATIONS))
    found: list[str] = field(default_factory=list)

    def observe(self, seconds: float) -> None:
        """In place: a task was completed so long after it was given out."""
        self.durations.append(seconds)

    def mark(self, pending: Mapping[str, Pending], now: float, factor: float) -> int:
        """In place: those given out more than `factor` times the median duration ago. Answers how many there
        are."""
        if len(self.durations) < ENOUGH_DURATIONS:
            return 0
        limit_s = max(LEAST_S, factor * median(self.durations))
        late = sorted(
            (held.since, task_id) for task_id, held in pending.items() if now - held.since > limit_s
        )
        self.found = [task_id for _, task_id in late]
        for task_id in self.found:
            pending[task_id].late = True
        return len(late)

    def first_for(self, pending: Mapping[str, Pending], trainer: str) -> str | None:
        """The task to give to that trainer too; none that it has, and none that was given again since it was
        marked."""
        for task_id in self.found:
            held = pending.get(task_id)
            if held is not None and held.late and not held.record.is_at(trainer):
                return task_id
        return None


REMEMBERED = 4096


@dataclass(slots=True)
class Repeats:
    """Requests and reports that were taken before: one whose answer got lost is recognised when it comes
    again.

    `asks`: (trainer, request) -> the pending task it got. `requests`: those whose tasks have ended.
    `reports`: (epoch, task, attempt, trainer) that were taken. The last two are bounded, and empty in a new
    master.
    """

    asks: dict[tuple[str, str], str] = field(default_factory=dict)
    requests: OrderedDict[str, None] = field(default_factory=OrderedDict)
    reports: OrderedDict[tuple[int, str, int, str], None] = field(default_factory=OrderedDict)

    def copy(self) -> Repeats:
        return Repeats(self.asks.copy(), self.requests.copy(), self.reports.copy())

    def knows(self, trainer: str, request: str) -> bool:
        """Whether that request was answered with a task before."""
        return (trainer, request) in self.asks or request in self.requests

    def add_ask(self, task_id: str, record: PendingTask) -> None:
        """In place."""
        for each in record.attempts:
            if each.request:
                self.asks[each.trainer, each.request] = task_id

    def drop_ask(self, record: PendingTask) -> None:
        """In place. The task is not pending any more, or it is pending for another request."""
        for each in record.attempts:
            self.asks.pop((each.trainer, each.request), None)

    def remember(self, task_id: str, record: PendingTask, by: Attempt | None = None) -> None:
        """In place. `by`: the attempt that was reported; None: the newest."""
        ended = by or record.attempts[0]
        _add(self.reports, (record.epoch, task_id, ended.attempt, ended.trainer))
        _add(self.requests, ended.request)


def _add(memory: OrderedDict[Any, None], item: object) -> None:
    memory[item] = None
    while len(memory) > REMEMBERED:
        memory.popitem(last=False)

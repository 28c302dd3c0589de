"""Requests and reports that were taken before: one whose answer got lost is recognised when it comes again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from trireme_shared.protocol.records import Attempt, PendingTask

REMEMBERED = 4096


@dataclass(slots=True)
class Repeats:
    """`asks`: (trainer, request) -> the pending task it got. `requests`: those whose tasks have ended. `reports`: (epoch, task,
    attempt, trainer) that were taken. The last two are bounded, and empty in a new master."""

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

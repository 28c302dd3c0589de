"""Requests and reports that were taken before: one whose answer got lost is recognised when it comes again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from shared.records import PendingTask

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

    def add_ask(self, task_id: str, record: PendingTask) -> None:
        """In place."""
        if record.request:
            self.asks[record.trainer, record.request] = task_id

    def drop_ask(self, record: PendingTask) -> None:
        """In place. The task is not pending any more, or it is pending for another request."""
        self.asks.pop((record.trainer, record.request), None)

    def remember(self, task_id: str, record: PendingTask) -> None:
        """In place."""
        _add(self.reports, (record.epoch, task_id, record.attempt, record.trainer))
        _add(self.requests, record.request)


def _add(memory: OrderedDict[Any, None], item: object) -> None:
    memory[item] = None
    while len(memory) > REMEMBERED:
        memory.popitem(last=False)

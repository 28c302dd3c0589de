"""What a trainer is at work on, as it stands in the file that outlives it (trireme_shared.platform.runtime.begun)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from trireme_shared.protocol.records.tasks import Task

FILE_CHARACTERS = 80
READING = -1
"""As a number of a minibatch: the records of the whole task are being read."""


@dataclass(frozen=True, slots=True)
class BegunWork:
    """Minibatch `minibatch` of a task, or READING. `first`, `count`: the task's records in `file`."""

    task: str
    epoch: int
    minibatch: int
    file: str
    first: int
    count: int

    @classmethod
    def of(cls, task: Task, minibatch: int = READING) -> Self:
        return cls(task.task_id, task.epoch, minibatch, task.file, task.first, task.count)

    def to_bytes(self) -> bytes:
        """Less than 511 bytes: a long name of a file loses its beginning."""
        # once for each minibatch: what does not change within a task is kept
        return _task_bytes(self.task, self.epoch, self.file, self.first, self.count) % self.minibatch

    @classmethod
    def from_bytes(cls, text: bytes) -> Self | None:
        """None if that is no work."""
        try:
            found = cls(**json.loads(text))
        except (ValueError, TypeError):
            return None
        return found if isinstance(found.minibatch, int) and isinstance(found.task, str) else None

    def __str__(self) -> str:
        what = "read the records" if self.minibatch == READING else f"computed minibatch {self.minibatch}"
        return f"{what} of task {self.task} ({self.file} records {self.first}-{self.first + self.count - 1})"


@lru_cache(maxsize=64)
def _task_bytes(task: str, epoch: int, file: str, first: int, count: int) -> bytes:
    """With a place for the number of the minibatch."""
    short = file if len(file) <= FILE_CHARACTERS else f"…{file[-FILE_CHARACTERS:]}"
    known = {"task": task, "epoch": epoch, "file": short, "first": first, "count": count}
    text = json.dumps(known, ensure_ascii=False).replace("%", "%%")
    return f'{text[:-1]}, "minibatch": %d}}'.encode()

"""The dataset as the master knows it: files and record counts. Tasks are computed from prefix sums and never stored.

files      a (10 records)     b (5)          task_records = 4
tasks      0    1    2        3    4         a task never spans files; a file's last one may be short
records    0-3  4-7  8-9      0-3  4
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

FORMAT = 1


@dataclass(frozen=True, slots=True)
class TableFile:
    """`offsets[k]`: byte at which the file's k-th task starts, in formats of lines; else empty. `stamp`: what the file was when it was
    counted (shared/trireme_shared/datasets/dataset_files.py); "": that is not known."""

    path: str
    records: int
    offsets: tuple[int, ...] = ()
    stamp: str = ""

    def to_map(self) -> dict[str, Any]:
        """JSON types."""
        found = {"path": self.path, "records": self.records, "offsets": list(self.offsets)}
        return found | ({"stamp": self.stamp} if self.stamp else {})

    @classmethod
    def from_map(cls, value: dict[str, Any]) -> TableFile:
        """Raises KeyError, TypeError or ValueError if `value` is not what `to_map` gives."""
        offsets = tuple(map(int, value["offsets"]))
        return cls(str(value["path"]), int(value["records"]), offsets, str(value.get("stamp", "")))


@dataclass(frozen=True, slots=True)
class ShardLocation:
    """Records [first, first + count) of `file`; `offset`: the byte where record `first` starts, None where unknown; `stamp`: see
    TableFile."""

    file: str
    first: int
    count: int
    offset: int | None = None
    stamp: str = ""


@dataclass(frozen=True, slots=True)
class FileTable:
    """`digest` names the table (SHA-256 of its content, see master_service/storage/counting.py). Files without records have no task.
    `left_out`: records at the ends of files that no task has, because the job drops short minibatches.

    Raises ValueError if a file's offsets do not fit its records.
    """

    files: tuple[TableFile, ...]
    task_records: int
    digest: str = ""
    left_out: int = 0
    task_ends: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.task_records < 1:
            msg = f"task_records must be at least 1, got {self.task_records}"
            raise ValueError(msg)
        counts = [-(-file.records // self.task_records) for file in self.files]
        for file, tasks in zip(self.files, counts, strict=True):
            if file.records < 0 or (file.offsets and len(file.offsets) != tasks):
                msg = (
                    f"{file.path}: {file.records} records make {tasks} tasks, but there are {len(file.offsets)} offsets"
                )
                raise ValueError(msg)
        object.__setattr__(self, "task_ends", tuple(accumulate(counts)))

    @property
    def tasks(self) -> int:
        return self.task_ends[-1] if self.task_ends else 0

    @property
    def records(self) -> int:
        return sum(file.records for file in self.files)

    @property
    def short_tasks(self) -> Iterator[tuple[int, int]]:
        """(number, records) of the tasks with fewer than `task_records` records: the last ones of files."""
        for file, end in zip(self.files, self.task_ends, strict=True):
            if rest := file.records % self.task_records:
                yield end - 1, rest

    def uneven(self, minibatch: int) -> bool:
        """Whether some task has fewer minibatches, of so many records, than the others."""
        full = -(-self.task_records // minibatch)
        return any(-(-records // minibatch) < full for _, records in self.short_tasks)

    def locate(self, task: int) -> ShardLocation:
        """Where task number `task` lies, in O(log files). Raises IndexError outside [0, tasks)."""
        if not 0 <= task < self.tasks:
            msg = f"task {task} is outside [0, {self.tasks})"
            raise IndexError(msg)
        place = bisect_right(self.task_ends, task)
        file = self.files[place]
        within = task - (self.task_ends[place - 1] if place else 0)
        first = within * self.task_records
        count = min(self.task_records, file.records - first)
        return ShardLocation(file.path, first, count, file.offsets[within] if file.offsets else None, file.stamp)

    def to_map(self) -> dict[str, Any]:
        """JSON types, without the digest (which is computed from them)."""
        return {
            "format": FORMAT,
            "task_records": self.task_records,
            "files": [file.to_map() for file in self.files],
        } | ({"left_out": self.left_out} if self.left_out else {})

    @classmethod
    def from_map(cls, value: dict[str, Any], digest: str = "") -> FileTable:
        """Raises ValueError if `value` is not what `to_map` gives."""
        try:
            if value["format"] != FORMAT:
                msg = f"file table of format {value['format']}; this version reads format {FORMAT}"
                raise ValueError(msg)
            files = tuple(map(TableFile.from_map, value["files"]))
            return cls(files, int(value["task_records"]), digest, int(value.get("left_out", 0)))
        except (KeyError, TypeError) as error:
            msg = f"not a file table: {error!r}"
            raise ValueError(msg) from error

    def __repr__(self) -> str:
        return f"<FileTable {self.digest[:12]}: {len(self.files)} files, {self.records} records, {self.tasks} tasks>"

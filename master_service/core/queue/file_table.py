"""The dataset as the master knows it: files and record counts, and how many records a task has.

counted files ──TaskSizes──► FileTable         files      a (10 records)     b (5)          task_records = 4
                                               tasks      0    1    2        3    4
                                               records    0-3  4-7  8-9      0-3  4

A task never spans files; a file's last one may be short.

Tasks are computed from prefix sums and never stored.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from trireme_shared.protocol.records import JobSpec, Mode

FORMAT = 1


@dataclass(frozen=True, slots=True)
class TableFile:
    """`offsets[k]`: byte at which the file's k-th task starts, in formats of lines; of the shards of an
    iterable a digest of the task's first record; else empty. `stamp`: what the file was when it was counted
    (shared/trireme_shared/datasets/dataset_files.py); "": that is not known."""

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
    """Records [first, first + count) of `file`; `offset`: of its first record, see TableFile, None where
    unknown; `stamp`: see TableFile."""

    file: str
    first: int
    count: int
    offset: int | None = None
    stamp: str = ""


@dataclass(frozen=True, slots=True)
class FileTable:
    """`digest` names the table (SHA-256 of its content, see master_service/storage/counting.py). Files
    without records have no task. `left_out`: records at the ends of files that no task has, because the job
    drops short minibatches. `in_sequence`: the records of a file can be read only one after the other, so the
    tasks of a lane follow each other (Runs in master_service/core/queue/streams.py).

    Raises ValueError if a file's offsets do not fit its records.
    """

    files: tuple[TableFile, ...]
    task_records: int
    digest: str = ""
    left_out: int = 0
    in_sequence: bool = False
    task_ends: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.task_records < 1:
            msg = f"task_records must be at least 1, got {self.task_records}"
            raise ValueError(msg)
        counts = [-(-file.records // self.task_records) for file in self.files]
        for file, tasks in zip(self.files, counts, strict=True):
            if file.records < 0 or (file.offsets and len(file.offsets) != tasks):
                msg = (
                    f"{file.path}: {file.records} records make {tasks} tasks, but there are "
                    f"{len(file.offsets)} offsets"
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
        return ShardLocation(
            file.path, first, count, file.offsets[within] if file.offsets else None, file.stamp
        )

    def to_map(self) -> dict[str, Any]:
        """JSON types, without the digest (which is computed from them)."""
        found = {
            "format": FORMAT,
            "task_records": self.task_records,
            "files": [file.to_map() for file in self.files],
        }
        found |= {"left_out": self.left_out} if self.left_out else {}
        return found | ({"in_sequence": True} if self.in_sequence else {})

    @classmethod
    def from_map(cls, value: dict[str, Any], digest: str = "") -> FileTable:
        """Raises ValueError if `value` is not what `to_map` gives."""
        try:
            if value["format"] != FORMAT:
                msg = f"file table of format {value['format']}; this version reads format {FORMAT}"
                raise ValueError(msg)
            files = tuple(map(TableFile.from_map, value["files"]))
            left_out, in_sequence = int(value.get("left_out", 0)), bool(value.get("in_sequence", False))
            return cls(files, int(value["task_records"]), digest, left_out, in_sequence)
        except (KeyError, TypeError) as error:
            msg = f"not a file table: {error!r}"
            raise ValueError(msg) from error

    def __repr__(self) -> str:
        return (
            f"<FileTable {self.digest[:12]}: {len(self.files)} files, {self.records} records, "
            f"{self.tasks} tasks>"
        )


MOST_MINIBATCHES = 16
KEPT_BY_LANE = 128
"""Of a file with more minibatches for each lane than these only every second byte is kept, of one with twice
as many every fourth, ..."""
TOLERATED = 100
"""An epoch may be longer by one step in so many than with the smallest tasks."""


@dataclass(frozen=True, slots=True)
class TaskSizes:
    """How many records a task has, if the job does not say, and how the records of a dataset become tasks.

    A task has up to 16 minibatches: many, because the records of a task are what is shuffled together; fewer,
    where lanes would not end together. Small datasets get small tasks, so steps are full: 1,438 records in
    three files, 8 lanes, minibatches of 32 make tasks of 3 minibatches and 6 steps; tasks of 16 would give
    three lanes all of it, in 15 steps. While files are counted nobody knows that number yet. Formats of lines
    keep the byte of every minibatch, and of large files fewer.

    `minibatch`: records of one. `streams`: those that should end together. `fixed`: records of a task, as the
    job says. `drop_last`: a minibatch that would be short, at the end of a file, is left out.
    """

    minibatch: int
    streams: int = 1
    fixed: int | None = None
    drop_last: bool = False

    @classmethod
    def of(cls, spec: JobSpec, known: int = 0) -> TaskSizes:
        """For the records that are trained. `known`: records of a task in a job that has begun."""
        streams = spec.lanes if spec.mode is Mode.SYNC else spec.trainers
        return cls(spec.minibatch_size, streams, known or spec.records_per_task, spec.drop_last)

    @classmethod
    def evaluated(cls, spec: JobSpec, known: int = 0) -> TaskSizes:
        """For the records of the evaluation: all of them count."""
        return replace(cls.of(spec, known), drop_last=False)

    def stride(self, records: int) -> int:
        """Records between two bytes that are kept of a file of `records` records."""
        if self.fixed is not None:
            return self.fixed
        minibatches, step = -(-records // self.minibatch), 1
        while step < MOST_MINIBATCHES and minibatches > KEPT_BY_LANE * self.streams * step:
            step *= 2
        return step * self.minibatch

    def choose(self, counts: Sequence[int]) -> int:
        """Records of a task. `counts`: records of each file."""
        if self.fixed is not None:
            return self.fixed
        step = self.stride(max(counts, default=0)) // self.minibatch
        files = Counter(-(-self._kept(records) // self.minibatch) for records in counts)
        ideal = -(-sum(minibatches * times for minibatches, times in files.items()) // self.streams)
        best, fewest = step, 0
        for size in range(MOST_MINIBATCHES // step * step, 0, -step):
            steps = longest_share(_tasks(files, size), self.streams)
            if steps <= ideal + ideal // TOLERATED:
                return size * self.minibatch
            if not fewest or steps < fewest:
                best, fewest = size, steps
        return best * self.minibatch

    def table(self, files: Sequence[TableFile]) -> FileTable:
        """The table of counted files, without a digest. Their offsets are `stride` records apart."""
        size = self.choose([file.records for file in files])
        kept = tuple(self._cut(file, size) for file in files)
        return FileTable(
            kept, size, left_out=sum(file.records for file in files) - sum(file.records for file in kept)
        )

    def _kept(self, records: int) -> int:
        return records - records % self.minibatch if self.drop_last else records

    def _cut(self, file: TableFile, size: int) -> TableFile:
        records, every = self._kept(file.records), size // self.stride(file.records)
        return replace(file, records=records, offsets=file.offsets[::every][: -(-records // size)])


def _tasks(files: Counter[int], size: int) -> Counter[int]:
    """Minibatches of a task -> how many tasks have so many. `files`: minibatches of a file -> how many files
    have so many."""
    found = Counter[int]()
    for minibatches, times in files.items():
        found[size] += minibatches // size * times
        found[minibatches % size] += times
    del found[0]
    return found


def longest_share(sizes: Mapping[int, int], lanes: int) -> int:
    """Minibatches of the lane that has the most. `sizes`: minibatches of a task -> how many tasks have so
    many."""
    most = place = 0
    for size in sorted(sizes, reverse=True):
        end = place + sizes[size]
        most += size * (-(-end // lanes) - -(-place // lanes))
        place = end
    return most

"""How the records of a dataset become tasks, and how many records a task has if the job does not say.

counted files ──choose──► minibatches of a task ──table──► FileTable

A task has up to 16 minibatches: many, because the records of a task are what is shuffled together; fewer, where lanes would not end
together. Small datasets get small tasks, so steps are full: 1,438 records in three files, 8 lanes, minibatches of 32 make tasks of 3
minibatches and 6 steps; tasks of 16 would give three lanes all of it, in 15 steps.
While files are counted nobody knows that number yet. Formats of lines keep the byte of every minibatch, and of large files fewer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from master_service.core.queue.dealing import longest_share
from master_service.core.queue.file_table import FileTable, TableFile
from trireme_shared.protocol.records import JobSpec, Mode

MOST_MINIBATCHES = 16
KEPT_BY_LANE = 128
"""Of a file with more minibatches for each lane than these only every second byte is kept, of one with twice as many every fourth, ..."""
TOLERATED = 100
"""An epoch may be longer by one step in so many than with the smallest tasks."""


@dataclass(frozen=True, slots=True)
class TaskSizes:
    """`minibatch`: records of one. `streams`: those that should end together. `fixed`: records of a task, as the job says. `drop_last`: a
    minibatch that would be short, at the end of a file, is left out."""

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
        return FileTable(kept, size, left_out=sum(file.records for file in files) - sum(file.records for file in kept))

    def _kept(self, records: int) -> int:
        return records - records % self.minibatch if self.drop_last else records

    def _cut(self, file: TableFile, size: int) -> TableFile:
        records, every = self._kept(file.records), size // self.stride(file.records)
        return replace(file, records=records, offsets=file.offsets[::every][: -(-records // size)])


def _tasks(files: Counter[int], size: int) -> Counter[int]:
    """Minibatches of a task -> how many tasks have so many. `files`: minibatches of a file -> how many files have so many."""
    found = Counter[int]()
    for minibatches, times in files.items():
        found[size] += minibatches // size * times
        found[minibatches % size] += times
    del found[0]
    return found

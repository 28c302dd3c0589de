"""The interface of all readers: a range of a file's records. A reader knows nothing of tasks, lanes or epochs."""

from __future__ import annotations

from typing import Protocol

from shared.errors import DatasetError
from trainer_agent.data.shard import Shard


class Reader(Protocol):
    """`read` blocks, and may be called from several threads."""

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:
        """Records [first, first + count) of `file`, a path of the master's file table.

        `offset`: the byte at which record `first` starts, where the master knows it (formats of lines). Raises DatasetError
        if the file cannot be read, or has fewer records than the master counted.
        """


def too_short(file: str, first: int, count: int, records: int) -> DatasetError:
    """The error for a file that ends after `records` records though the master counted at least `first + count`."""
    msg = f"{file} ends at record {records}, but records {first} to {first + count - 1} were counted in it"
    return DatasetError(msg, hint="the file was changed while the job ran: start a new job", url=file, records=records)

"""The interface of all readers: a range of a file's records. A reader knows nothing of tasks, lanes or epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from trainer_agent.data.shard import Shard
from trireme_shared.datasets.dataset_files import CountedFiles
from trireme_shared.platform.storage.files import trouble_in_user_code
from trireme_shared.protocol.errors import DatasetError, TriremeError, is_interrupt


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


@contextmanager
def blaming(file: str, first: int, count: int) -> Iterator[None]:
    """Whatever code raises in this block that makes these records, or columns of them, says whose fault it is: DatasetError for the
    records, ResourceExhausted and StorageUnreachable for what the machine or the storage lacks."""
    try:
        yield
    except TriremeError:
        raise
    except BaseException as error:  # the user's datasets and their values may raise anything, SystemExit too
        if is_interrupt(error):
            raise
        records = f"{file} records {first}-{first + count - 1}"
        if (trouble := trouble_in_user_code(error, records)) is not None:
            raise trouble from error
        msg = f"{records} cannot be read: {type(error).__name__}: {error}"
        hint = "correct or remove the record, or correct the code that reads it"
        raise DatasetError(msg, hint=hint, url=file) from error


class Blaming:
    """A reader whose every failure says whose fault it is, so that no record ends the process that reads it: DatasetError for the
    records, ResourceExhausted and StorageUnreachable for what the machine or the storage lacks. A file that is not the counted one is
    refused before it is read, and that ends the job (`fatal`); with `changed` that is only told."""

    def __init__(self, reader: Reader, files: CountedFiles, changed: Callable[[str], object] | None = None) -> None:
        self._reader, self._files, self._changed = reader, files, changed

    def __repr__(self) -> str:
        return f"<Blaming {self._reader!r}>"

    def read(self, file: str, first: int, count: int, offset: int | None = None, stamp: str = "") -> Shard:
        """See Reader; `stamp`: of the file when it was counted. Raises ResourceExhausted, StorageUnreachable as well: the same read may succeed later."""
        difference = self._files.difference(file, stamp)
        if difference is not None and self._changed is not None:
            self._changed(f"{difference.message}; it is trained all the same (changed_files = report)")
        elif difference is not None:
            raise DatasetError(difference.message, hint=difference.hint, fatal=True, **difference.details)
        with blaming(file, first, count):
            return self._reader.read(file, first, count, offset)

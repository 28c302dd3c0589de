"""The first records of a dataset: those of its first file that has any, in the order in which its files are numbered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from shared.errors import DatasetError
from shared.records.datasets import Dataset
from shared.storage.dataset_files import files_of

T = TypeVar("T")


def from_first_file(dataset: Dataset, read: Callable[[str], Sequence[T]]) -> tuple[str, Sequence[T]]:
    """(file, what `read(file)` gives) of the first file that gives any; ("", ()) if there is none. Raises DatasetError if no file matches,
    and what `read` raises, but for files without a record."""
    for file in files_of(dataset):
        try:
            found = read(file)
        except DatasetError as error:
            if error.details.get("records") != 0:
                raise
            continue
        if found:
            return file, found
    return "", ()

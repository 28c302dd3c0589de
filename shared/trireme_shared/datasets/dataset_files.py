"""The files of a dataset, in the order in which its records are numbered: the same for the master and for a trial of a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from trireme_shared.datasets import saved_datasets
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import Dataset, HuggingFace, ImageFolder

T = TypeVar("T")

_HINT = "check the path that dataset() returns (relative ones start at the working directory)"


def files_of(dataset: Dataset) -> list[str]:
    """Raises DatasetError if a URL matches no file. What names code is not looked for."""
    if isinstance(dataset, HuggingFace):
        return [file for folder in dataset.urls for file in saved_datasets.arrow_files(folder, dataset.split)]
    if isinstance(dataset, ImageFolder):
        return list(dataset.urls)
    chosen: list[str] = []
    for url in dataset.urls:
        as_it_is = dataset.names_code and not files.is_glob(url)
        chosen += [url] if as_it_is else files.expand_some(url, _HINT)
    return chosen


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

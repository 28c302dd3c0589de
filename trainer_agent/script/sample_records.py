"""The first records of a dataset, to try a script with before the dataset is counted."""

from __future__ import annotations

import numpy as np

from trainer_agent.data import Reader, Shard, default_collate, open_dataset
from trainer_agent.model.compute import Records
from trireme_shared.datasets.dataset_files import files_of
from trireme_shared.platform.storage import files
from trireme_shared.platform.storage.compressed import is_compressed
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import Dataset, JsonLines, TFRecord, WebDataset

COMPARED_FILES = 32


def first_records(dataset: Dataset, count: int, seed: int = 0) -> Records:
    """At most `count` records from the start of the first file that has any. `seed`: of the job. Raises DatasetError."""
    reader = open_dataset(dataset, seed)
    problem: DatasetError | None = None
    for file in files_of(dataset):
        try:
            shard = _start_of(reader, file, count)
        except DatasetError as error:
            if error.details.get("records") != 0 and (dataset.names_code or not files.is_empty(file)):
                problem = problem or error
            continue
        return shard.minibatch(np.arange(len(shard), dtype=np.int64))
    raise problem or DatasetError(
        f"{', '.join(dataset.urls)} has no records", hint="check the path that dataset() returns"
    )


def compare_files(dataset: Dataset, seed: int = 0) -> None:
    """Formats without a schema, for a script without `collate`: the first record of each file has the columns and types of the dataset. Up to
    COMPARED_FILES files, spread over all; compressed ones would have to be decompressed whole. Raises DatasetError, with file and column."""
    if not isinstance(dataset, JsonLines | TFRecord | WebDataset):
        return
    reader = open_dataset(dataset, seed)
    found = [file for file in files_of(dataset) if not is_compressed(file)]
    for file in found[:: -(-len(found) // COMPARED_FILES) or 1]:
        if not files.is_empty(file):
            default_collate(reader.read(file, 0, 1).minibatch(np.arange(1, dtype=np.int64)))


def _start_of(reader: Reader, file: str, count: int) -> Shard:
    """`count` records, or half as many each time until the file has that many."""
    while True:
        try:
            return reader.read(file, 0, count)
        except DatasetError:
            if count == 1:
                raise
            count //= 2

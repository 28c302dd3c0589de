"""Counts of binary formats: the records of a file, and the byte at which each of its tasks starts, 8 bytes a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from master_service.core.queue.file_table import TableFile
from master_service.core.queue.task_sizes import TaskSizes
from master_service.storage.task_starts import TaskStarts
from shared.datasets import record_io, tar_records, tf_record
from shared.records.datasets import RecordIO, TFRecord, WebDataset
from shared.storage import files
from shared.storage.compressed import scanning

CHECK_EVERY = 1024


def count_framed(
    file: str, dataset: TFRecord | RecordIO | WebDataset, sizes: TaskSizes, check: Callable[[], None]
) -> TableFile:
    """`check` is called often, and raises when counting shall stop. Raises DatasetError with the byte of what is damaged."""
    with files.reading(file, dataset.kind), scanning(file) as source:
        if isinstance(dataset, RecordIO):  # readers find chunks by their heads
            records = 0
            for chunk in record_io.chunks(source, file):
                check()
                records += chunk.records
            return TableFile(file, records)
        if isinstance(dataset, TFRecord):
            return _counted(file, tf_record.starts(source, file), sizes, check)
        starts = (record.start for record in tar_records.records(source, file))
        return _counted(file, starts, sizes, check)


def _counted(file: str, starts: Iterator[int], sizes: TaskSizes, check: Callable[[], None]) -> TableFile:
    kept = TaskStarts(sizes)
    while len(some := np.fromiter(islice(starts, CHECK_EVERY), np.int64)):
        check()
        kept.take(some)
    return kept.counted(file)

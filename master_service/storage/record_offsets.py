"""Counts of binary formats: the records of a file, and the byte at which each of its tasks starts, 8 bytes a task."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

from master_service.core.queue.file_table import TableFile
from shared.datasets import record_io, tar_records, tf_record
from shared.records.datasets import RecordIO, TFRecord, WebDataset
from shared.storage import files
from shared.storage.compressed import scanning

CHECK_EVERY = 1024


def count_framed(
    file: str, dataset: TFRecord | RecordIO | WebDataset, task_records: int, check: Callable[[], None]
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
            return _counted(file, tf_record.starts(source, file), task_records, check)
        starts = (record.start for record in tar_records.records(source, file))
        return _counted(file, starts, task_records, check)


def _counted(file: str, starts: Iterator[int], task_records: int, check: Callable[[], None]) -> TableFile:
    records, offsets = 0, array("q")
    for start in starts:
        if records % task_records == 0:
            offsets.append(start)
        if records % CHECK_EVERY == 0:
            check()
        records += 1
    return TableFile(file, records, tuple(offsets))

"""Files whose records are framed (RecordIO, TFRecord, tar files) are counted; the bytes at which tasks may start are kept: 8 bytes each."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
import numpy.typing as npt

from master_service.core.queue.file_table import TableFile
from master_service.core.queue.task_sizes import TaskSizes
from trireme_shared.datasets import record_files
from trireme_shared.platform.storage import files
from trireme_shared.platform.storage.compressed import scanning
from trireme_shared.protocol.records.datasets import RecordIO, TFRecord, WebDataset

CHECK_EVERY = 1024


class TaskStarts:
    """Every so many records one byte (`kept`), as TaskSizes says; of a long file fewer."""

    def __init__(self, sizes: TaskSizes) -> None:
        self.records = 0
        self._sizes, self._stride = sizes, sizes.stride(0)
        self.kept = array("q")

    def take(self, starts: npt.NDArray[np.int64]) -> None:
        """In place: the bytes of the next records."""
        self.kept.frombytes(starts[-self.records % self._stride :: self._stride].tobytes())
        self.records += len(starts)
        if (stride := self._sizes.stride(self.records)) > self._stride:
            self.kept, self._stride = self.kept[:: stride // self._stride], stride

    def counted(self, file: str) -> TableFile:
        """The file, all of whose records were taken."""
        return TableFile(file, self.records, tuple(self.kept))


def count_framed(
    file: str, dataset: TFRecord | RecordIO | WebDataset, sizes: TaskSizes, check: Callable[[], None]
) -> TableFile:
    """`check` is called often, and raises when counting shall stop. Raises DatasetError with the byte of what is damaged."""
    with files.reading(file, dataset.kind), scanning(file) as source:
        if isinstance(dataset, RecordIO):  # readers find chunks by their heads
            records = 0
            for chunk in record_files.record_io_chunks(source, file):
                check()
                records += chunk.records
            return TableFile(file, records)
        if isinstance(dataset, TFRecord):
            return _counted(file, record_files.tf_record_starts(source, file), sizes, check)
        starts = (record.start for record in record_files.tar_records(source, file))
        return _counted(file, starts, sizes, check)


def _counted(file: str, starts: Iterator[int], sizes: TaskSizes, check: Callable[[], None]) -> TableFile:
    kept = TaskStarts(sizes)
    while len(some := np.fromiter(islice(starts, CHECK_EVERY), np.int64)):
        check()
        kept.take(some)
    return kept.counted(file)

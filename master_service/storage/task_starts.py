"""The bytes of a file at which tasks may start, kept while its records are counted: 8 bytes each."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from master_service.core.queue.file_table import TableFile
from master_service.core.queue.task_sizes import TaskSizes


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

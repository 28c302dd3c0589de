"""Parquet: a range of rows. The row groups used last are kept, so that tasks of one group read it once."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from threading import Lock

import pyarrow as pa
import pyarrow.parquet as pq

from trainer_agent.data.arrow import columns_of_table
from trainer_agent.data.reader import too_short
from trainer_agent.data.shard import Shard
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import Parquet

KEPT_BYTES = 256 << 20


class ParquetReader:
    """Keeps the row groups used last: at least one, and up to `kept_bytes`."""

    def __init__(self, dataset: Parquet, kept_bytes: int = KEPT_BYTES) -> None:
        self._columns = list(dataset.columns) if dataset.columns is not None else None
        self._kept_bytes = kept_bytes
        self._groups: OrderedDict[tuple[str, int], pa.Table] = OrderedDict()
        self._footers: dict[str, pq.FileMetaData] = {}
        self._lock = Lock()
        self.groups_read = 0

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:  # noqa: ARG002
        with self._lock, files.reading(file, "Parquet"):
            footer = self._footer(file)
            ends = list(accumulate(footer.row_group(group).num_rows for group in range(footer.num_row_groups)))
            if not ends or first + count > ends[-1]:
                raise too_short(file, first, count, ends[-1] if ends else 0)
            pieces = []
            for group in range(bisect_right(ends, first), footer.num_row_groups):
                start = ends[group - 1] if group else 0
                if start >= first + count:
                    break
                begin = max(first, start) - start
                pieces.append(self._group(file, group).slice(begin, min(first + count, ends[group]) - start - begin))
            return Shard(columns_of_table(pa.concat_tables(pieces)), count)

    def _footer(self, file: str) -> pq.FileMetaData:
        if file not in self._footers:
            with files.open_read(file) as source:
                footer = pq.read_metadata(source)
            names = footer.schema.to_arrow_schema().names
            missing = [name for name in self._columns or () if name not in names]
            if missing:
                msg = f"{file} has no column {missing[0]!r}; it has {', '.join(names)}"
                raise DatasetError(msg, hint="correct columns=(…) in dataset()", url=file)
            self._footers[file] = footer
        return self._footers[file]

    def _group(self, file: str, group: int) -> pa.Table:
        key = (file, group)
        if key in self._groups:
            self._groups.move_to_end(key)
            return self._groups[key]
        with files.open_read(file) as source, pq.ParquetFile(source, metadata=self._footers[file]) as parquet:
            table = parquet.read_row_group(group, columns=self._columns, use_threads=False)
        self.groups_read += 1
        self._groups[key] = table
        kept = sum(table.nbytes for table in self._groups.values())
        while kept > self._kept_bytes and len(self._groups) > 1:
            _, dropped = self._groups.popitem(last=False)
            kept -= dropped.nbytes
        return table

"""CSV: the shared scanner finds the rows, Arrow parses them. Column types are the same for every task."""

from __future__ import annotations

from threading import Lock

from trainer_agent.data.arrow import columns_of_table
from trainer_agent.data.lines import read_range
from trainer_agent.data.shard import Shard
from trireme_shared.datasets.csv_columns import CsvColumns
from trireme_shared.datasets.line_scan import refuse_archive
from trireme_shared.platform.storage import files
from trireme_shared.platform.storage.compressed import Decompressed
from trireme_shared.protocol.records.datasets import Csv


class CsvReader:
    def __init__(self, dataset: Csv) -> None:
        self._dataset = dataset
        self._content = Decompressed()
        self._columns = CsvColumns(dataset)
        self._lock = Lock()

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:
        refuse_archive(file)
        with self._lock, files.reading(file, "CSV"), self._content.opened(file) as source:
            header = self._columns.header(file, source)
            raw = read_range(source, self._dataset, file, first, count, offset, header.start)
            return Shard(columns_of_table(self._columns.table(file, raw, header.names, first)), count)

"""Saved HF datasets: rows of Arrow files, which are mapped."""

from __future__ import annotations

import json
from collections import OrderedDict
from threading import Lock
from typing import Any

import pyarrow as pa

from trainer_agent.data.arrow import columns_of_table
from trainer_agent.data.formats import images
from trainer_agent.data.reader import too_short
from trainer_agent.data.shard import Column, Shard, as_column
from trireme_shared.datasets.mapped_files import read_arrow
from trireme_shared.platform.storage import files
from trireme_shared.platform.storage.files import kept_open
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import HuggingFace

KEPT_FILES = 32


class HuggingFaceReader:
    """Keeps the mappings of the files used last."""

    def __init__(self, dataset: HuggingFace) -> None:
        self._dataset = dataset
        self._kept_files = min(KEPT_FILES, kept_open())
        self._tables: OrderedDict[str, pa.Table] = OrderedDict()
        self._lock = Lock()

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:  # noqa: ARG002
        with self._lock:
            table = self._table(file)
        if first + count > table.num_rows:
            raise too_short(file, first, count, table.num_rows)
        columns = columns_of_table(table.slice(first, count))
        for name in _images(table.schema) if self._dataset.decode else ():
            if name in columns:
                columns[name] = self._decoded(columns[name], file, first, name)
        return Shard(columns, count)

    def _table(self, file: str) -> pa.Table:
        if file not in self._tables:
            table = read_arrow(file)
            missing = [name for name in self._dataset.columns or () if name not in table.column_names]
            if missing:
                msg = f"{file} has no column {missing[0]!r}; it has {', '.join(table.column_names)}"
                raise DatasetError(msg, hint="correct columns=(…) in dataset()", url=file)
            self._tables[file] = table.select(list(self._dataset.columns)) if self._dataset.columns else table
            if len(self._tables) > self._kept_files:
                self._tables.popitem(last=False)
        self._tables.move_to_end(file)
        return self._tables[file]

    def _decoded(self, values: Column, file: str, first: int, name: str) -> Column:
        found = []
        for number, value in enumerate(values, first):
            place = f"column {name!r} of record {number}"
            if value is None:
                raise DatasetError(f"{file}: {place} has no image", hint="filter such rows out", url=file)
            content = value["bytes"]
            if content is None:
                with files.reading(value["path"], "an image"):
                    content = files.read_bytes(value["path"])
            found.append(images.decoded(content, self._dataset.image_size, file, place))
        return as_column(found)


def _images(schema: pa.Schema) -> list[str]:
    """Columns of type Image, by what `datasets` wrote into the schema."""
    try:
        said: dict[str, Any] = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return []
    return [name for name, kind in said.items() if isinstance(kind, dict) and kind.get("_type") == "Image"]

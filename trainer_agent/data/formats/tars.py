"""WebDataset: samples of tar files."""

from __future__ import annotations

import io
import json
from itertools import islice
from threading import Lock
from typing import Any, BinaryIO

import numpy as np

from trainer_agent.data.column_types import ColumnTypes
from trainer_agent.data.formats import images
from trainer_agent.data.formats.frames import chosen
from trainer_agent.data.shard import Record, Shard
from trireme_shared.datasets.dataset_files import from_first_file
from trireme_shared.datasets.record_files import Member, TarRecord, tar_records
from trireme_shared.platform.storage import files
from trireme_shared.platform.storage.compressed import Decompressed, scanning
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import WebDataset

_TEXTS = ("txt", "text", "transcript")
_NUMBERS = ("cls", "cls2", "index", "inx", "id")


class WebDatasetReader:
    def __init__(self, dataset: WebDataset) -> None:
        self._dataset, self._decode, self._size = dataset, dataset.decode, dataset.image_size
        self._content = Decompressed()
        self._types: ColumnTypes | None = None
        self._lock = Lock()

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:
        with files.reading(file, "a tar file"), self._content.opened(file) as source:
            found = chosen(tar_records(source, file, offset or 0), file, first, count, offset)
            samples = [self._record(source, file, record) for record in found]
        return self._column_types().shard(samples, file, first)

    def _column_types(self) -> ColumnTypes:
        """From the first file with samples, so that all trainers use the same."""
        with self._lock:
            if self._types is None:
                file, first = from_first_file(self._dataset, self._sample)
                advice = "write the files of a column with one type and no gap, or define collate(records)"
                self._types = ColumnTypes(first, f"the first sample of {file}", advice)
            return self._types

    def _sample(self, file: str) -> list[Record]:
        with files.reading(file, "a tar file"), scanning(file) as source:
            return [self._record(source, file, record) for record in islice(tar_records(source, file), 1)]

    def _record(self, source: BinaryIO, file: str, record: TarRecord) -> Record:
        values = {name: self._value(source, file, name, member) for name, member in record.members.items()}
        return {"__key__": record.key, **values}

    def _value(self, source: BinaryIO, file: str, column: str, member: Member) -> Any:
        source.seek(member.data)
        content = source.read(member.size)
        suffix = column.rpartition(".")[2]
        if not self._decode:
            return content
        if suffix in images.SUFFIXES:
            return images.decoded(content, self._size, file, f"{member.name} (byte {member.data})")
        try:
            if suffix in _NUMBERS:
                return int(content)
            if suffix in _TEXTS:
                return content.decode()
            if suffix == "json":
                return json.loads(content)
            if suffix == "npy":
                return np.load(io.BytesIO(content), allow_pickle=False)
        except (ValueError, EOFError) as error:
            msg = f"{file}: {member.name} (byte {member.data}) cannot be read as {suffix}: {error}"
            raise DatasetError(msg, hint="correct it, or read bytes: WebDataset(…, decode=False)", url=file) from error
        return content

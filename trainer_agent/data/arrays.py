"""Fixed-size records: windows of bytes, rows of .npy files. Local files are memory-mapped."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import PurePosixPath
from threading import Lock
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from trainer_agent.data.reader import too_short
from trainer_agent.data.shard import Shard
from trireme_shared.datasets import mapped_files
from trireme_shared.platform.storage import files
from trireme_shared.platform.storage.files import kept_open
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import Bytes, Npy


class BytesReader:
    def __init__(self, dataset: Bytes) -> None:
        self._step = dataset.record_bytes
        self._window = dataset.record_bytes + dataset.overlap

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:  # noqa: ARG002
        length = (count - 1) * self._step + self._window
        with files.reading(file, "bytes"), files.open_read(file) as source:
            source.seek(first * self._step)
            content = source.read(length)
            if len(content) < length:
                records = max(0, (files.size(file) - self._window + self._step) // self._step)
                raise too_short(file, first, count, records)
        windows = np.lib.stride_tricks.sliding_window_view(
            np.frombuffer(content, dtype=np.uint8), self._window
        )
        return Shard({"bytes": windows[:: self._step]}, count)


class NpyReader:
    """Aligned files are read together; the file table has only the first of them. Each map takes a
    descriptor, so only the maps used last are kept, `kept_files` of them (None: see kept_open)."""

    def __init__(self, dataset: Npy, kept_files: int | None = None) -> None:
        self._dataset = dataset
        self._arrays: OrderedDict[str, npt.NDArray[Any]] = OrderedDict()
        self._kept_files = kept_files or kept_open()
        self._lock = Lock()

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:  # noqa: ARG002
        chosen = (
            [found for url in self._dataset.urls for found in files.expand(url)]
            if self._dataset.aligned
            else [file]
        )
        names = self._dataset.columns or tuple(PurePosixPath(name).stem for name in chosen)
        if len(names) != len(chosen):
            msg = (
                f"columns names {len(names)} arrays ({', '.join(names)}), but there are {len(chosen)} "
                "aligned files"
            )
            raise DatasetError(msg, hint="give one name for each file")
        columns: dict[str, npt.NDArray[Any]] = {}
        for name, path in zip(names, chosen, strict=True):
            with files.reading(path, ".npy"):
                columns[name] = self._rows(path, first, count)
        return Shard(columns, count)

    def _rows(self, file: str, first: int, count: int) -> npt.NDArray[Any]:
        local = files.local_path(file)
        if local is None:
            with files.open_read(file) as source:
                return _read_rows(source, file, first, count)
        with self._lock:
            if file not in self._arrays:
                self._arrays[file] = mapped_files.mapped_npy(local)
                if len(self._arrays) > self._kept_files:
                    self._arrays.popitem(last=False)
            self._arrays.move_to_end(file)
            array = self._arrays[file]
        if array.ndim == 0 or first + count > len(array):
            raise too_short(file, first, count, len(array) if array.ndim else 0)
        return array[first : first + count]


def _read_rows(source: BinaryIO, file: str, first: int, count: int) -> npt.NDArray[Any]:
    shape, fortran_order, dtype = mapped_files.read_npy_head(source)
    if not shape or first + count > shape[0]:
        raise too_short(file, first, count, shape[0] if shape else 0)
    if dtype.hasobject or fortran_order:
        msg = (
            f"{file} holds {'Python objects' if dtype.hasobject else 'columns (Fortran order)'}, not "
            "rows of numbers"
        )
        raise DatasetError(
            msg, hint="save it again: numpy.save(path, numpy.ascontiguousarray(array))", url=file
        )
    row = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
    source.seek(first * row, 1)
    content = source.read(count * row)
    if len(content) < count * row:
        raise too_short(file, first, count, first + len(content) // max(row, 1))
    return np.frombuffer(content, dtype=dtype).reshape(count, *shape[1:])

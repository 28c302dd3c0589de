"""Readers keep a bounded number of files open, whatever the number of files of a dataset."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer_agent.data import blaming, open_dataset
from trireme_shared.protocol.errors import ResourceExhausted
from trireme_shared.protocol.records.datasets import (
    Bytes,
    Csv,
    Custom,
    Dataset,
    HuggingFace,
    IterableStyle,
    JsonLines,
    MapStyle,
    Npy,
    Parquet,
    TextLines,
    WebDataset,
)

FILES, KEPT = 40, 4


def write_arrow(path: Path, number: int) -> None:
    table = pa.table({"x": [number]})
    with pa.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table)


def write_tar(path: Path, number: int) -> None:
    with tarfile.open(path, "w") as archive:
        info, content = tarfile.TarInfo("0.cls"), str(number).encode()
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))


Write = Callable[[Path, int], object]
FORMATS: dict[str, tuple[type[Dataset], Write, dict[str, object]]] = {
    "npy": (Npy, lambda path, n: np.save(path, np.array([n])), {"columns": ("x",)}),
    "csv": (Csv, lambda path, n: path.write_text(f"x\n{n}\n"), {}),
    "csv.gz": (Csv, lambda path, n: path.write_bytes(gzip.compress(f"x\n{n}\n".encode())), {}),
    "jsonl.gz": (
        JsonLines,
        lambda path, n: path.write_bytes(gzip.compress(json.dumps({"x": n}).encode())),
        {},
    ),
    "txt.gz": (TextLines, lambda path, n: path.write_bytes(gzip.compress(str(n).encode())), {}),
    "parquet": (Parquet, lambda path, n: pq.write_table(pa.table({"x": [n]}), path), {}),
    "bin": (Bytes, lambda path, n: path.write_bytes(bytes([n])), {"record_bytes": 1}),
    "tar": (WebDataset, write_tar, {}),
    "arrow": (HuggingFace, write_arrow, {}),
}


@pytest.mark.parametrize("suffix", FORMATS)
def test_files_that_were_read_are_closed(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("trireme_shared.platform.storage.files._MOST_KEPT", KEPT)
    kind, write, options = FORMATS[suffix]
    paths = [tmp_path / f"{number:02}.{suffix}" for number in range(FILES)]
    for number, path in enumerate(paths):
        write(path, number)
    reader = open_dataset(kind(str(paths[0]), **options))
    read: Callable[[Path], dict[str, object]] = lambda path: reader.read(str(path), 0, 1).columns(  # noqa: E731
        np.arange(1)
    )
    first = read(paths[0])
    before = len(list(Path("/proc/self/fd").iterdir()))
    for path in paths:
        read(path)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + KEPT
    assert repr(read(paths[0])) == repr(first)


FULL = """
import errno
FULL = OSError(errno.EMFILE, "Too many open files")
class Items:
    def __len__(self): return 4
    def __getitem__(self, i): raise FULL
class Unbegun:
    def __iter__(self): raise FULL
class Ended:
    def __iter__(self):
        yield 1
        raise FULL
class Rows:
    count = staticmethod(lambda url: 4)
    @staticmethod
    def read(url, first, count): raise FULL
class Lazy:
    def __array__(self, *_, **__): raise FULL
lazy = [{"x": Lazy()}] * 4
"""


@pytest.mark.parametrize(
    "dataset",
    [
        MapStyle("full_items:Items", records=4),
        IterableStyle("full_items:Unbegun", records=4),
        IterableStyle("full_items:Ended", records=4),
        Custom("-", reader="full_items:Rows"),
        MapStyle("full_items:lazy", records=4),
    ],
    ids=lambda dataset: dataset.reader,
)
def test_a_limit_that_a_users_code_meets_is_never_the_datas_fault(tmp_path, monkeypatch, dataset):
    (tmp_path / "full_items.py").write_text(FULL)
    monkeypatch.syspath_prepend(tmp_path)
    reader = open_dataset(dataset)
    with pytest.raises(ResourceExhausted, match="the limit of open files is reached"), blaming("-", 0, 2):
        reader.read("-", 0, 2).columns(np.arange(2))
    sys.modules.pop("full_items")

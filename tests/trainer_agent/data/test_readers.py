"""Every reader against the records that were written: whole files, every range, offsets, globs, other file
systems."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from master_service.storage.job_storage import count_records
from trainer_agent.data import open_dataset
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import (
    Bytes,
    Csv,
    Custom,
    Dataset,
    JsonLines,
    Npy,
    Parquet,
    TextLines,
)

RECORDS = 23
TEXTS = ["plain", "", "a,b", 'say "hi"', "two\nlines", "héllo ✓", " spaced ", "cr\r\nlf"]


@dataclass(frozen=True)
class Case:
    """`write(path)` makes a file; `dataset(url)` describes it; `records` is what is in it."""

    suffix: str
    write: Callable[[Path], object]
    dataset: Callable[[str], Dataset]
    records: list[dict[str, Any]]


def rows() -> list[dict[str, Any]]:
    return [{"id": i, "x": i / 4, "ok": i % 3 == 0, "text": TEXTS[i % len(TEXTS)]} for i in range(RECORDS)]


def write_csv(path: Path, end: str = "\n") -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator=end, quoting=csv.QUOTE_NONNUMERIC)
        writer.writerow(["id", "x", "ok", "text"])
        for number, row in enumerate(rows()):
            if number % 7 == 2:
                file.write(end)
            writer.writerow([row["id"], row["x"], str(row["ok"]).lower(), row["text"]])


def write_parquet(path: Path) -> None:
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(RECORDS * 3, dtype=np.float32)), 3)
    columns = {name: [row[name] for row in rows()] for name in rows()[0]} | {"v": vectors}
    pq.write_table(pa.table(columns), path, row_group_size=5)


def parquet_records() -> list[dict[str, Any]]:
    return [row | {"v": np.arange(i * 3, i * 3 + 3, dtype=np.float32)} for i, row in enumerate(rows())]


LINES = [f"line {i} é" if i % 4 else "" for i in range(RECORDS)]
OBJECTS = [{"i": i, "nested": {"k": [i]}, "text": TEXTS[i % len(TEXTS)]} for i in range(RECORDS)]
BYTES = bytes(range(256))

CASES = {
    "parquet": Case("parquet", write_parquet, Parquet, parquet_records()),
    "csv": Case("csv", write_csv, Csv, rows()),
    "csv with CRLF": Case("csv", lambda path: write_csv(path, "\r\n"), Csv, rows()),
    "csv with a byte order mark": Case(
        "csv",
        lambda path: (write_csv(path), path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())),
        Csv,
        rows(),
    ),
    "csv without header": Case(
        "tsv",
        lambda path: path.write_text("".join(f"{i}\t{i / 2}\n" for i in range(RECORDS))),
        lambda url: Csv(url, column_names=("a", "b"), delimiter="\t"),
        [{"a": i, "b": i / 2} for i in range(RECORDS)],
    ),
    "text": Case(
        "txt", lambda path: path.write_text("\n".join(LINES)), TextLines, [{"text": line} for line in LINES]
    ),
    "text with CRLF": Case(
        "txt",
        lambda path: path.write_bytes("\r\n".join(LINES).encode() + b"\r\n"),
        TextLines,
        [{"text": line} for line in LINES],
    ),
    "json lines": Case(
        "jsonl",
        lambda path: path.write_text("\n \n".join(json.dumps(value) for value in OBJECTS)),
        JsonLines,
        OBJECTS,
    ),
    "bytes": Case(
        "bin",
        lambda path: path.write_bytes(BYTES),
        lambda url: Bytes(url, record_bytes=11, overlap=2),
        [{"bytes": np.frombuffer(BYTES[i * 11 : i * 11 + 13], dtype=np.uint8)} for i in range(RECORDS)],
    ),
    "npy": Case(
        "npy",
        lambda path: np.save(path, np.arange(RECORDS * 4, dtype=np.int16).reshape(RECORDS, 2, 2)),
        lambda url: Npy(url, columns=("x",)),
        [{"x": np.arange(i * 4, i * 4 + 4, dtype=np.int16).reshape(2, 2)} for i in range(RECORDS)],
    ),
    "custom": Case(
        "any",
        lambda path: path.write_text("unused"),
        lambda url: Custom(url, reader="own_reader:squares"),
        [{"n": i, "square": i * i} for i in range(RECORDS)],
    ),
}

OWN_READER = f"""
class squares:
    count = staticmethod(lambda url: {RECORDS})
    read = staticmethod(
        lambda url, first, count: ({{"n": n, "square": n * n}} for n in range(first, first + count))
    )
"""


@pytest.fixture(autouse=True)
def own_reader(tmp_path, monkeypatch):
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own_reader.py").write_text(OWN_READER)
    monkeypatch.syspath_prepend(folder)
    yield
    import sys

    sys.modules.pop("own_reader", None)


@pytest.fixture(params=CASES, ids=str)
def case(request) -> Case:
    return CASES[request.param]


@pytest.fixture(params=[name for name in CASES if name != "custom"], ids=str)
def file_case(request) -> Case:
    return CASES[request.param]


def place(case: Case, path: Path, protocol: str) -> str:
    """The case's file under a URL of `protocol`."""
    case.write(path)
    if protocol == "local":
        return str(path)
    if protocol == "file":
        return path.as_uri()
    url = f"memory://readers/{path.name}"
    fsspec.filesystem("memory").pipe_file(url, path.read_bytes())
    return url


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    return len(found) == len(expected) and all(
        list(left) == list(right) and all(np.array_equal(left[name], right[name]) for name in right)
        for left, right in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("protocol", ["local", "file", "memory"])
@pytest.mark.parametrize("task_records", [1, 4, 23, 100])
def test_tasks_give_the_records_that_were_written(case, tmp_path, protocol, task_records):
    url = place(case, tmp_path / f"data.{case.suffix}", protocol)
    table = count_records(case.dataset(url), task_records)
    assert table.records == RECORDS
    reader = open_dataset(case.dataset(url))
    found = []
    for task in range(table.tasks):
        where = table.locate(task)
        shard = reader.read(where.file, where.first, where.count, where.offset)
        assert len(shard) == where.count
        found += shard.records(np.arange(len(shard)))
    assert same(found, case.records)


def test_every_range_can_be_read_without_an_offset(case, tmp_path):
    url = place(case, tmp_path / f"data.{case.suffix}", "local")
    reader = open_dataset(case.dataset(url))
    for first in range(RECORDS):
        for count in {1, 2, RECORDS - first} - {0}:
            expected = case.records[first : first + count]
            if len(expected) == count:
                shard = reader.read(url, first, count)
                assert same(shard.records(np.arange(count)), expected)


def test_columns_and_records_are_two_views_of_the_same(case, tmp_path):
    url = place(case, tmp_path / f"data.{case.suffix}", "local")
    shard = open_dataset(case.dataset(url)).read(url, 3, 15)
    chosen = np.array([7, 0, 14, 7])
    columns, records = shard.columns(chosen), shard.records(chosen)
    assert list(columns) == list(records[0])
    assert all(
        np.array_equal(columns[name][i], record[name]) for i, record in enumerate(records) for name in record
    )
    assert same(list(shard.minibatch(chosen)), records)


def test_a_file_that_became_shorter_is_named_with_both_counts(file_case, tmp_path):
    url = place(file_case, tmp_path / f"data.{file_case.suffix}", "local")
    with pytest.raises(
        DatasetError, match=rf"data\.{file_case.suffix} ends at record 23, but records 20 to 24 were counted"
    ):
        open_dataset(file_case.dataset(url)).read(url, 20, 5)


def test_a_file_that_vanished_is_named(file_case, tmp_path):
    url = str(tmp_path / f"gone.{file_case.suffix}")
    with pytest.raises(DatasetError, match=rf"gone\.{file_case.suffix} does not exist"):
        open_dataset(file_case.dataset(url)).read(url, 0, 1)


@pytest.mark.parametrize("protocol", ["local", "memory"])
def test_a_glob_reads_its_files_in_the_order_of_their_names(case, tmp_path, protocol):
    for name in ("b", "a", "c"):
        url = place(case, tmp_path / f"part-{name}.{case.suffix}", protocol)
    dataset = case.dataset(url.replace("part-c", "part-*"))
    table = count_records(dataset, 10)
    assert [Path(file.path).stem for file in table.files] == ["part-a", "part-b", "part-c"]
    assert table.records == 3 * RECORDS
    where = table.locate(table.tasks - 1)
    shard = open_dataset(dataset).read(where.file, where.first, where.count, where.offset)
    assert same(shard.records(np.arange(3)), case.records[20:])

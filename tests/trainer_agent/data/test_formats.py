"""What each format promises beyond ranges: types, errors in the middle of a file, row groups read once."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer_agent.data import open_dataset
from trainer_agent.data.arrow import ParquetReader
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import Bytes, Csv, Custom, JsonLines, Npy, Parquet, TextLines


def everything(dataset, count, file=None):
    shard = open_dataset(dataset).read(file or dataset.urls[0], 0, count)
    return shard.columns(np.arange(count))


# ---------------------------------------------------------------- Parquet


def test_parquet_reads_a_row_group_once_while_it_is_needed(tmp_path):
    path = str(tmp_path / "x.parquet")
    pq.write_table(pa.table({"a": list(range(100))}), path, row_group_size=25)
    reader = ParquetReader(Parquet(path))
    for first in (0, 10, 40, 30, 90, 5):
        assert reader.read(path, first, 10).columns(np.arange(10))["a"].tolist() == list(
            range(first, first + 10)
        )
    assert reader.groups_read == 3


def test_parquet_keeps_no_more_bytes_than_allowed(tmp_path):
    path = str(tmp_path / "x.parquet")
    pq.write_table(pa.table({"a": np.arange(100)}), path, row_group_size=25)
    reader = ParquetReader(Parquet(path), kept_bytes=500)  # two groups of 25 int64 fit
    for first in (0, 25, 50, 25, 50, 0):
        reader.read(path, first, 25)
    assert reader.groups_read == 4


def test_parquet_reads_only_the_columns_asked_for(tmp_path):
    path = str(tmp_path / "x.parquet")
    pq.write_table(pa.table({"a": [1], "b": [2], "c": [3]}), path)
    assert list(everything(Parquet(path, columns=("c", "a")), 1)) == ["c", "a"]
    with pytest.raises(DatasetError, match=r"x.parquet has no column 'd'; it has a, b, c"):
        everything(Parquet(path, columns=("a", "d")), 1)


def test_parquet_columns_keep_their_types(tmp_path):
    path = str(tmp_path / "x.parquet")
    table = pa.table(
        {
            "int8": pa.array([1, 2], pa.int8()),
            "double": pa.array([1.5, None], pa.float64()),
            "missing": pa.array([1, None], pa.int32()),
            "equal": pa.array([[1, 2], [3, 4]], pa.list_(pa.int64())),
            "ragged": pa.array([[1], [2, 3]], pa.list_(pa.float32())),
            "matrix": pa.array([[[1, 2]], [[3, 4]]], pa.list_(pa.list_(pa.int16(), 2), 1)),
            "words": pa.array([["a"], ["b", "c"]]),
            "category": pa.array(["x", "x"]).dictionary_encode(),
            "raw": pa.array([b"\x00", b""]),
        }
    )
    pq.write_table(table, path)
    found = everything(Parquet(path), 2)
    assert found["int8"].dtype == np.int8
    assert np.isnan(found["double"][1])
    assert found["missing"] == [1, None]
    assert found["equal"].tolist() == [[1, 2], [3, 4]]
    assert [row.tolist() for row in found["ragged"]] == [[1], [2, 3]]
    assert found["matrix"].shape == (2, 1, 2)
    assert found["words"] == [["a"], ["b", "c"]]
    assert found["category"] == ["x", "x"]
    assert found["raw"] == [b"\x00", b""]


def test_parquet_lists_are_right_in_a_slice_of_a_row_group(tmp_path):
    path = str(tmp_path / "x.parquet")
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(20)), 2)
    pq.write_table(
        pa.table({"l": [[i, i + 1] for i in range(10)], "f": fixed, "r": [[0] * i for i in range(10)]}), path
    )
    found = ParquetReader(Parquet(path)).read(path, 4, 3).columns(np.arange(3))
    assert found["l"].tolist() == [[4, 5], [5, 6], [6, 7]]
    assert found["f"].tolist() == [[8, 9], [10, 11], [12, 13]]
    assert [len(row) for row in found["r"]] == [4, 5, 6]


# ---------------------------------------------------------------- CSV


def test_csv_types_are_those_of_the_datasets_beginning_in_every_task(tmp_path):
    (tmp_path / "a.csv").write_text("i,x,ok,s,n\n1,1.5,true,a,\n2,2,false,7,\n")
    (tmp_path / "b.csv").write_text("s,i,x,ok,n\n7,3,4,true,\n")
    found = everything(Csv(f"{tmp_path}/*.csv"), 1, f"{tmp_path}/b.csv")
    assert {name: found[name].dtype for name in ("i", "x", "ok")} == {
        "i": np.int64,
        "x": np.float32,
        "ok": np.bool_,
    }
    assert found["s"] == ["7"]
    assert found["n"] == [""]


def test_csv_column_types_overrule_the_beginning(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,1\n2,2\n")
    found = everything(Csv(str(path), column_types={"a": "float64", "b": "string"}), 2)
    assert found["a"].dtype == np.float64
    assert found["b"] == ["1", "2"]
    with pytest.raises(DatasetError, match="has no column 'z'; it has a, b"):
        everything(Csv(str(path), column_types={"z": "int64"}), 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n3\n", "Expected 2 columns, got 1"),
        ("a,b\n1,2\n1,2,3\n", "Expected 2 columns, got 3"),
        ("a,a\n1,2\n", "has two columns 'a'"),
        ("", "is empty: no header line"),
        ("a,b\n1,\x00\xff\n".encode("latin-1"), "cannot be read as CSV"),
    ],
)
def test_a_csv_file_that_is_none_is_told(tmp_path, content, message):
    path = tmp_path / "bad.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DatasetError, match=rf"bad\.csv.*{message}"):
        everything(Csv(str(path)), content.count(10 if isinstance(content, bytes) else "\n") - 1 or 1)


def test_a_csv_value_of_another_type_later_on_asks_for_column_types(tmp_path):
    path = tmp_path / "late.csv"
    path.write_text("a\n" + "1\n" * 10_001 + "x\n")
    reader = open_dataset(Csv(str(path)))
    with pytest.raises(
        DatasetError, match=r"column 'a': .*late\.csv record 10001 has 'x', which does not fit int64"
    ) as caught:
        reader.read(str(path), 10_000, 2)
    assert "column_types" in caught.value.hint


# ---------------------------------------------------------------- lines


@pytest.mark.parametrize(
    ("dataset", "content", "message"),
    [
        (JsonLines, b'{"a": 1}\n{"a": \n', "record 1 is not JSON: "),
        (JsonLines, b'{"a": 1}\n[1, 2]\n', "record 1 is a JSON list, not an object"),
        (JsonLines, b'{"a": 1}\n{"a": "\xff"}\n', "record 1 is not UTF-8: byte 0xff"),
        (TextLines, b"ok\n\xe9t\xe9\n", "record 1 is not UTF-8: byte 0xe9"),
    ],
)
def test_a_broken_line_is_told_with_its_number(tmp_path, dataset, content, message):
    path = tmp_path / "lines"
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=f"lines {message}"):
        everything(dataset(str(path)), 2)


def test_json_records_keep_their_own_fields(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1, "b": [1, 2.5]}\n{"b": [3, 4], "c": "x"}\n')
    shard = open_dataset(JsonLines(str(path))).read(str(path), 0, 2)
    assert shard.records(np.array([1])) == [{"b": [3, 4], "c": "x"}]
    columns = shard.columns(np.array([0, 1]))
    assert columns["a"] == [1, None]
    assert columns["b"].dtype == np.float32
    assert columns["c"] == [None, "x"]


# ---------------------------------------------------------------- arrays


def test_windows_of_bytes_overlap(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(b"abcdefgh")
    found = everything(Bytes(str(path), record_bytes=3, overlap=1), 2)
    assert [row.tobytes() for row in found["bytes"]] == [b"abcd", b"defg"]


def test_aligned_arrays_are_one_record(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(6).reshape(3, 2))
    np.save(tmp_path / "y.npy", np.array([7, 8, 9]))
    urls = (str(tmp_path / "x.npy"), str(tmp_path / "y.npy"))
    found = everything(Npy(*urls, aligned=True), 3)
    assert {name: column.tolist() for name, column in found.items()} == {
        "x": [[0, 1], [2, 3], [4, 5]],
        "y": [7, 8, 9],
    }
    assert list(everything(Npy(*urls, aligned=True, columns=("a", "b")), 3)) == ["a", "b"]


def test_an_array_in_fortran_order_is_read_where_it_is_local(tmp_path):
    np.save(tmp_path / "x.npy", np.asfortranarray(np.arange(6).reshape(3, 2)))
    assert everything(Npy(str(tmp_path / "x.npy")), 3)["x"].tolist() == [[0, 1], [2, 3], [4, 5]]


# ---------------------------------------------------------------- custom


def test_a_custom_reader_that_fails_or_ends_early_is_told(tmp_path, monkeypatch):
    (tmp_path / "odd_reader.py").write_text(
        "class short:\n  count = staticmethod(lambda url: 3)\n"
        "  read = staticmethod(lambda url, first, count: iter([{}]))\nclass broken(short):\n"
        "  read = staticmethod(lambda url, first, count: [].pop())\nclass values(short):\n"
        "  read = staticmethod(lambda url, first, count: [1, 2, 3])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DatasetError, match="u ends at record 1, but records 0 to 2 were counted in it"):
        everything(Custom("u", reader="odd_reader:short"), 3)
    with pytest.raises(DatasetError, match=r"odd_reader:broken.read\('u', 0, 3\) failed: IndexError"):
        everything(Custom("u", reader="odd_reader:broken"), 3)
    with pytest.raises(DatasetError, match="record 0 is int, not a dict"):
        everything(Custom("u", reader="odd_reader:values"), 3)

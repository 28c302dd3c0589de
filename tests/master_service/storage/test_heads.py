"""Files that differ in columns or types are told before training, with the file, the column and both
types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from master_service.storage.counting import Heads
from master_service.storage.job_storage import PartialCounts, count_records
from trainer_agent.data import open_dataset
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import Csv, HuggingFace, Npy, Parquet


def parquet(path: Path, **columns: Any) -> None:
    pq.write_table(pa.table(columns), path)


FLOAT, DOUBLE = pa.array([0.5, 1.5], pa.float32()), pa.array([0.5, 1.5], pa.float64())
PARQUET = [
    ({"h": FLOAT}, {"h": DOUBLE}, "column 'h' is double in .*2.parquet and float in .*0.parquet"),
    (
        {"n": pa.array([1, 2], pa.int64())},
        {"n": pa.array([1, 2], pa.int32())},
        "column 'n' is int32 in .* and int64 in",
    ),
    ({"n": pa.array([1, 2])}, {"n": pa.array([1.0, None])}, "column 'n' is double in .* and int64 in"),
    ({"n": pa.array([1, 2])}, {"n": pa.array([None, None])}, "column 'n' is null in .* and int64 in"),
    ({"a": [1], "b": [2]}, {"a": [1]}, "2.parquet has no column 'b', and .*0.parquet has it"),
    ({"a": [1]}, {"a": [1], "b": [2]}, "0.parquet has no column 'b', and .*2.parquet has it"),
    (
        {"v": pa.array([[1.0]], pa.list_(pa.float32(), 1))},
        {"v": pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2))},
        "list of 2 float in",
    ),
    ({"s": [{"a": 1}]}, {"s": [{"a": "x"}]}, "struct of a: string in .* and struct of a: int64 in"),
]


@pytest.mark.parametrize(("first", "other", "told"), PARQUET)
def test_parquet_files_that_differ_are_told_with_the_column_and_both_types(tmp_path, first, other, told):
    for number, columns in enumerate((first, first, other)):
        parquet(tmp_path / f"{number}.parquet", **columns)
    with pytest.raises(DatasetError, match=told):
        count_records(Parquet(str(tmp_path / "*.parquet")), 10)


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({"s": pa.array(["a", "b"])}, {"s": pa.array(["a", "b"], pa.large_string())}),
        ({"s": pa.array(["a", "b"])}, {"s": pa.array(["a", "b"]).dictionary_encode()}),
        (
            {"s": pa.array([[1], [2]], pa.list_(pa.int64()))},
            {"s": pa.array([[1], [2]], pa.large_list(pa.int64()))},
        ),
        ({"a": pa.array([1, 2]), "b": pa.array([1, 2])}, {"b": pa.array([1, 2]), "a": pa.array([1, 2])}),
    ],
    ids=["large_string", "dictionary", "large_list", "order of columns"],
)
def test_other_spellings_of_one_type_are_no_difference(tmp_path, first, other):
    parquet(tmp_path / "0.parquet", **first)
    parquet(tmp_path / "1.parquet", **other)
    dataset = Parquet(str(tmp_path / "*.parquet"))
    records = [
        open_dataset(dataset).read(str(tmp_path / f"{n}.parquet"), 0, 2).records(np.arange(2)) for n in (0, 1)
    ]
    assert records[0] == records[1]
    assert count_records(dataset, 10).records == 4


def test_only_the_columns_that_are_read_are_compared_and_empty_files_are_not(tmp_path):
    parquet(tmp_path / "0.parquet", a=pa.array([], pa.string()))
    parquet(tmp_path / "1.parquet", a=[1], b=[2])
    parquet(tmp_path / "2.parquet", a=[1], b=["x"])
    with pytest.raises(DatasetError, match="column 'b' is string") as told:
        count_records(Parquet(str(tmp_path / "*.parquet")), 10)
    assert told.value.hint.endswith('columns=("a",)')
    assert count_records(Parquet(str(tmp_path / "*.parquet"), columns=("a",)), 10).records == 2


def arrow(path: Path, **columns: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    table = pa.table(columns)
    with pa.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table)
    state = {"_data_files": [{"filename": path.name}]}
    (path.parent / "state.json").write_text(json.dumps(state))


def test_saved_datasets_that_differ_are_told(tmp_path):
    arrow(tmp_path / "a" / "data.arrow", label=pa.array([1, 2]))
    arrow(tmp_path / "b" / "data.arrow", label=pa.array(["x", "y"]))
    with pytest.raises(
        DatasetError, match=r"column 'label' is string in .*/b/data.arrow and int64 in .*/a/data.arrow"
    ):
        count_records(HuggingFace(str(tmp_path / "a"), str(tmp_path / "b")), 10)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            np.zeros((2, 5)),
            "the rows of .*2.npy are float64 of shape .5,., those of .*0.npy float32 of shape .5,.",
        ),
        (np.zeros((2, 4), np.float32), "2.npy are float32 of shape .4,."),
        (np.zeros(2, np.float32), "2.npy are float32 of shape .., those"),
        (np.zeros((2, 5), ">f4"), ""),
    ],
)
def test_arrays_that_differ_in_type_or_shape_of_rows_are_told(tmp_path, other, told):
    for number, array in enumerate((np.zeros((2, 5), np.float32), np.zeros((7, 5), np.float32), other)):
        np.save(tmp_path / f"{number}.npy", array)
    dataset = Npy(str(tmp_path / "*.npy"), columns=("x",))
    if not told:  # another byte order is the same type in batches
        assert count_records(dataset, 10).records == 11
        return
    with pytest.raises(DatasetError, match=told):
        count_records(dataset, 10)
    assert count_records(Npy(str(tmp_path / "0.npy"), str(tmp_path / "2.npy"), aligned=True), 10).records == 2


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (("a,b\n1,2\n", "a,b\n1,2\n", "a\n1\n"), "2.csv has no column 'b', and .*0.csv has it"),
        (("a\n1\n", "a,b\n1,2\n"), "0.csv has no column 'b', and .*1.csv has it"),
        (("a\n1\n", "a\n5\n2.5\n"), "column 'a': .*1.csv record 1 has '2.5', which does not fit int64"),
        (
            ("a\n1.5\n", "a\n120000003\n"),
            "column 'a': .*1.csv record 0 has '120000003', which does not fit float32",
        ),
        (("a\n1\n", "a\n2\nx\n"), "column 'a': .*1.csv record 1 has 'x', which does not fit int64"),
        (("a,b\n1,x\n", "b,a\ny,2\n", "a,b\n"), ""),
    ],
)
def test_csv_files_that_differ_in_header_or_types_are_told(tmp_path, files, told):
    for number, content in enumerate(files):
        (tmp_path / f"{number}.csv").write_text(content)
    dataset = Csv(str(tmp_path / "*.csv"))
    if not told:
        assert count_records(dataset, 10).records == 2
        return
    with pytest.raises(DatasetError, match=told):
        count_records(dataset, 10)


def test_csv_reads_the_columns_that_all_files_have(tmp_path):
    for number, content in enumerate(("a,b\n1,2\n", "c,a\n9,3\n")):
        (tmp_path / f"{number}.csv").write_text(content)
    dataset = Csv(str(tmp_path / "*.csv"), columns=("a",))
    assert count_records(dataset, 10).records == 2
    records = [
        open_dataset(dataset).read(str(tmp_path / f"{n}.csv"), 0, 1).records(np.arange(1)) for n in (0, 1)
    ]
    assert records == [[{"a": 1}], [{"a": 3}]]
    with pytest.raises(DatasetError, match=r"1.csv has no column 'b'; it has c, a"):
        count_records(Csv(str(tmp_path / "*.csv"), columns=("b",)), 10)


def write_arrow(path: Path) -> None:
    table = pa.table({"a": [1]})
    with pa.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table)


@pytest.mark.parametrize(
    ("kind", "write"),
    [
        (Parquet, lambda path: parquet(path, a=[1])),
        (Npy, lambda path: np.save(path, np.zeros((2, 3)))),
        (Csv, lambda path: path.write_text("a\n1\n")),
        (HuggingFace, write_arrow),
    ],
)
def test_a_file_that_is_counted_is_not_read_again_to_be_compared(tmp_path, monkeypatch, kind, write):
    path = tmp_path / "0.npy"
    write(path)
    monkeypatch.setattr("trireme_shared.datasets.dataset_files.arrow_files", lambda folder, _: [folder])
    monkeypatch.setattr(Heads, "_read", lambda _, file: pytest.fail(f"{file} is read again"))
    assert count_records(kind(str(path)), 10).records


def test_files_that_an_earlier_master_has_counted_are_compared_too(tmp_path):
    for number, kind in enumerate((np.float32, np.float64)):
        np.save(tmp_path / f"{number}.npy", np.zeros((2, 3), kind))
    dataset, storage = Npy(str(tmp_path / "*.npy"), columns=("x",)), str(tmp_path / "storage")
    for _ in range(2):
        partial = PartialCounts(storage, dataset, 10)
        with pytest.raises(DatasetError, match=r"1.npy are float64"):
            count_records(dataset, 10, None, partial)
        partial.keep(now=True)

"""Whole numbers keep all 64 bits in every reader, and a column has one dtype in all batches of a job, or the
column is refused by name."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from google_crc32c import value as crc32c

from trainer_agent.data import default_collate, open_dataset
from trireme_shared.datasets.record_files import masked
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import (
    Csv,
    Custom,
    Dataset,
    HuggingFace,
    JsonLines,
    MapStyle,
    Npy,
    Parquet,
    TFRecord,
    WebDataset,
)

BIG, SMALL = 2**63 + 5, 2**53 + 1
UNSIGNED = [BIG, BIG + 1, 3, 4]
SIGNED = [-(2**63), SMALL, SMALL + 1, 2**63 - 1]
PLAIN = [1, 2, 3, 4]


def csv(path: Path, values: Sequence[Any]) -> Dataset:
    path.write_text("x\n" + "".join(f"{value}\n" for value in values))
    return Csv(str(path))


def json_lines(path: Path, values: Sequence[Any]) -> Dataset:
    path.write_text("".join(json.dumps({"x": value}) + "\n" for value in values))
    return JsonLines(str(path))


def parquet(path: Path, values: Sequence[Any]) -> Dataset:
    pq.write_table(pa.table({"x": _arrow(values)}), path)
    return Parquet(str(path))


def hugging_face(path: Path, values: Sequence[Any]) -> Dataset:
    table = pa.table({"x": _arrow(values)})
    with pa.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table)
    return HuggingFace(str(path))


def _arrow(values: Sequence[Any]) -> pa.Array:
    return pa.array(values, pa.uint64() if max(values) >= 2**63 else pa.int64())


def _npy(array: np.ndarray) -> bytes:
    np.save(made := io.BytesIO(), array)
    return made.getvalue()


def npy(path: Path, values: Sequence[Any]) -> Dataset:
    path.write_bytes(_npy(np.array(values, dtype=np.uint64 if max(values) >= 2**63 else np.int64)))
    return Npy(str(path), columns=("x",))


def npy_of_the_other_byte_order(path: Path, values: Sequence[Any]) -> Dataset:
    path.write_bytes(_npy(np.array(values, dtype=">u8" if max(values) >= 2**63 else ">i8")))
    return Npy(str(path), columns=("x",))


def web_dataset(path: Path, values: Sequence[Any]) -> Dataset:
    with tarfile.open(path, "w") as archive:
        for number, value in enumerate(values):
            info, content = tarfile.TarInfo(f"{number}.x.cls"), str(value).encode()
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return WebDataset(str(path))


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    pieces = []
    while number > 0x7F:
        pieces.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*pieces, number])


def framed(field: int, content: bytes) -> bytes:
    return bytes([field << 3 | 2]) + varint(len(content)) + content


def tf_record(path: Path, values: Sequence[Any]) -> Dataset:
    with path.open("wb") as file:
        for value in values:
            packed = (
                framed(3, framed(1, varint(value)))
                if isinstance(value, int)
                else framed(2, framed(1, struct.pack("<f", value)))
            )
            example = framed(1, framed(1, framed(1, b"x") + framed(2, packed)))
            head = struct.pack("<Q", len(example))
            file.write(
                head
                + struct.pack("<I", masked(crc32c(head)))
                + example
                + struct.pack("<I", masked(crc32c(example)))
            )
    return TFRecord(str(path))


def of_code(kind: type[Dataset], convert: Callable[[int], str]) -> Callable[[Path, Sequence[Any]], Dataset]:
    def write(path: Path, values: Sequence[Any]) -> Dataset:
        name = f"numbers_{abs(hash((path, tuple(values))))}"
        items = ", ".join(f'{{"x": {convert(value)}}}' for value in values)
        body = (
            f"import numpy as np\nimport torch\nitems = [{items}]\nclass reader:\n    count = "
            "staticmethod(lambda url: len(items))\n"
        )
        body += "    read = staticmethod(lambda url, first, count: items[first:first + count])\n"
        (path.parent / f"{name}.py").write_text(body)
        return MapStyle(f"{name}:items") if kind is MapStyle else Custom(str(path), reader=f"{name}:reader")

    return write


def numpy_scalar(value: int) -> str:
    return f"np.uint64({value})" if value >= 2**63 else f"np.int64({value})"


WRITERS: dict[str, Callable[[Path, Sequence[Any]], Dataset]] = {
    "csv": csv,
    "json_lines": json_lines,
    "parquet": parquet,
    "hugging_face": hugging_face,
    "npy": npy,
    "npy_of_the_other_byte_order": npy_of_the_other_byte_order,
    "webdataset": web_dataset,
    "tfrecord": tf_record,
    "script": of_code(MapStyle, str),
    "script_numpy": of_code(
        MapStyle, lambda value: numpy_scalar(value) if abs(value) >= 2**31 else str(value)
    ),
    "custom": of_code(Custom, str),
}
TYPED = {"parquet", "hugging_face", "npy", "npy_of_the_other_byte_order", "tfrecord"}  # by what the file says
NO_UNSIGNED = {"tfrecord"}  # its int64 lists are signed


def batches(dataset: Dataset, records: int, size: int = 2) -> list[torch.Tensor]:
    """The column x, task by task."""
    reader, file = open_dataset(dataset), dataset.urls[0]
    found = []
    for first in range(0, records, size):
        count = min(size, records - first)
        batch = default_collate(reader.read(file, first, count).minibatch(np.arange(count)))
        found.append(batch["x.cls" if isinstance(dataset, WebDataset) else "x"])
    return found


@pytest.fixture(autouse=True)
def importable(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture(autouse=True)
def single_arrow_file(monkeypatch):
    """The Arrow file itself stands for its folder."""
    monkeypatch.setattr("trireme_shared.datasets.dataset_files.arrow_files", lambda folder, _: [folder])


@pytest.mark.parametrize("values", [SIGNED, PLAIN, UNSIGNED], ids=["signed", "plain", "unsigned"])
@pytest.mark.parametrize("name", WRITERS)
def test_whole_numbers_keep_every_bit_and_one_dtype(tmp_path, name, values):
    if values is UNSIGNED and name in NO_UNSIGNED:
        values = SIGNED
    found = batches(WRITERS[name](tmp_path / "x", values), len(values))
    assert [value for batch in found for value in batch.tolist()] == values
    assert {batch.dtype for batch in found} == {torch.uint64 if max(values) >= 2**63 else torch.int64}


TEXTS = ("csv", "json_lines", "webdataset", "script", "custom")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([-1, BIG, 3, 4], str(BIG)),
        ([1, 2**64, 3, 4], str(2**64)),
        ([1, -(2**63) - 1, 3, 4], str(-(2**63) - 1)),
        ([0.5, BIG, 3, 4], str(BIG)),
        ([0.5, 10**400, 3, 4], "1000000"),
        ([10**30, 10**30 + 1, 2, 3], str(10**30)),
    ],
    ids=[
        "negative and unsigned",
        "65 bits",
        "65 bits, negative",
        "beside a fraction",
        "beside a fraction, 400 digits",
        "30 digits",
    ],
)
@pytest.mark.parametrize("name", TEXTS)
def test_what_fits_into_no_64_bits_is_refused_with_column_and_value(tmp_path, name, values, told):
    if name == "webdataset" and 0.5 in values:
        pytest.skip("its numbers are whole")
    with pytest.raises(DatasetError, match=rf"column 'x.*{told}"):
        batches(WRITERS[name](tmp_path / "x", values), 4, 4)


@pytest.mark.parametrize("name", ["csv", "json_lines"])
@pytest.mark.parametrize(
    ("first", "late", "told"),
    [
        (1, "2.5", "has .*2.5.*does not fit int64"),
        (1, str(BIG), f"has .*{BIG}.*does not fit int64"),
        (1, "NaN", "column 'x'"),
        (0.5, "120000003.0", "has .*120000003.0.*does not fit float32"),
        (0.5, "120000003", "has .*120000003.*does not fit float32"),
        (BIG, "-1", "has .*-1.*does not fit uint64"),
        (16777217.0, str(SMALL), f"has .*{SMALL}.*does not fit float64"),
    ],
)
def test_a_later_value_that_does_not_fit_names_column_value_file_and_record(
    tmp_path, monkeypatch, name, first, late, told
):
    """The job's first records decide; in whatever task the value is, the others keep their dtype."""
    monkeypatch.setattr("trireme_shared.datasets.csv_columns.SAMPLE_RECORDS", 2)
    monkeypatch.setattr("trainer_agent.data.lines.SAMPLE_RECORDS", 2)
    path = tmp_path / "x"
    dataset = WRITERS[name](path, [first, first, first, first, "late", first])
    path.write_text(path.read_text().replace('"late"' if name == "json_lines" else "late", late))
    reader = open_dataset(dataset)
    read = lambda start: default_collate(reader.read(str(path), start, 2).minibatch(np.arange(2)))["x"]  # noqa: E731
    alone = read(0).dtype
    with pytest.raises(
        DatasetError, match=rf"column 'x'.*(record 4 |NaN|no value){'' if late == 'NaN' else told}"
    ) as refused:
        read(4)
    assert "column_types" in refused.value.hint or late == "NaN"
    assert read(2).dtype == alone


@pytest.mark.parametrize(
    ("late", "told"),
    [
        ("np.float64(2.5)", "float64 does not fit int32"),
        ("np.int64(3)", "int64 does not fit int32"),
        ("2**40", f"{2**40} does not fit int32"),
    ],
)
def test_a_later_value_of_a_users_own_is_not_cast_to_the_columns_dtype(tmp_path, late, told):
    name = f"late_{abs(hash(late))}"
    (tmp_path / f"{name}.py").write_text(
        f'import numpy as np\nitems = [{{"x": np.int32(1)}}, {{"x": {late}}}]\n'
    )
    reader = open_dataset(MapStyle(f"{name}:items"))
    assert default_collate(reader.read("", 0, 1).minibatch(np.arange(1)))["x"].dtype == torch.int32
    with pytest.raises(DatasetError, match=rf"column 'x': .*record 1 has .*{told}"):
        default_collate(reader.read("", 1, 1).minibatch(np.arange(1)))


@pytest.mark.parametrize("name", ["csv", "json_lines"])
@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([0.1, 0.2, 3.25, 4], torch.float32),  # fractions are rounded, as ever
        ([1.5, 1.25e20, 2, 3], torch.float32),  # a large number of few digits keeps them
        ([1700000000.123, 1700000001.5, 1, 2], torch.float64),  # times with a fraction
        ([120000001.0, 120000003.0, 5.0, 7.0], torch.float64),  # whole numbers that were written as floats
        ([-0.0, 1.5, 2.0, 3.0], torch.float32),
    ],
)
def test_numbers_with_a_fraction_lose_no_digit_of_a_whole_number(tmp_path, name, values, dtype):
    found = torch.cat(batches(WRITERS[name](tmp_path / "x", values), 4))
    assert found.dtype == dtype
    assert torch.equal(found, torch.tensor(values, dtype=dtype))
    assert str(found[0]) == str(torch.tensor(values, dtype=dtype)[0])  # the sign of zero


@pytest.mark.parametrize("name", ["csv", "json_lines"])
def test_column_types_say_otherwise(tmp_path, name):
    path = tmp_path / "x"
    kind = type(WRITERS[name](path, [1, 2, BIG, 4]))
    for given, dtype in (("uint64", torch.uint64), ("float64", torch.float64), ("float32", torch.float32)):
        found = batches(kind(str(path), column_types={"x": given}), 4)
        assert {batch.dtype for batch in found} == {dtype}
    assert batches(kind(str(path), column_types={"x": "uint64"}), 4)[1].tolist() == [BIG, 4]
    with pytest.raises(DatasetError, match=rf"column 'x': .* record 2 has .*{BIG}.*does not fit int64"):
        batches(kind(str(path), column_types={"x": "int64"}), 4)


def test_text_that_looks_like_a_number_may_stay_text(tmp_path):
    """Leading zeros are no digits of a number; who needs them says so."""
    dataset = csv(tmp_path / "x", ["007", "08", "7", "9"])
    assert batches(dataset, 4)[0].tolist() == [7, 8]
    assert batches(dataset.model_copy(update={"column_types": {"x": "string"}}), 4)[0] == ["007", "08"]
    assert batches(csv(tmp_path / "d", ["2026-11-28", "2026-11-29"]), 2)[0] == ["2026-11-28", "2026-11-29"]


def test_a_column_with_gaps_keeps_the_dtype_of_its_values(tmp_path):
    """Whether a task has a missing value must not change the batches without one."""
    path = str(tmp_path / "x.parquet")
    columns = {
        "small": pa.array([1, None, 3, 4], pa.int32()),
        "large": pa.array([BIG, None, 3, 4], pa.uint64()),
        "flag": pa.array([True, None, False, True]),
        "row": pa.array([[0.5, 1.5], None, [2.0, 3.0], [4.0, 5.0]], pa.list_(pa.float64())),
        "holes": pa.array([[1, 2], [None, 3], [4, 5], [6, 7]], pa.list_(pa.int16())),
        "half": pa.array(np.array([0.5, 1, 2, 3], dtype=np.float16)),
    }
    pq.write_table(pa.table(columns), path)
    reader = open_dataset(Parquet(path))
    with_gap, without = (
        reader.read(path, 0, 4).minibatch(np.array([2, 3])),
        reader.read(path, 2, 2).minibatch(np.array([0, 1])),
    )
    for name, value in default_collate(without).items():
        assert torch.equal(default_collate(with_gap)[name], value)
        assert default_collate(with_gap)[name].dtype == value.dtype
    with pytest.raises(DatasetError, match=r"column 'small': record 0 of the minibatch has no value"):
        default_collate(reader.read(path, 0, 4).minibatch(np.array([1, 2])))


def test_a_structured_array_is_refused_with_its_column(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(4, dtype=[("a", "i4"), ("b", "f4")]))
    with pytest.raises(DatasetError, match=r"column 'x' holds .*which torch has no type for"):
        batches(Npy(str(tmp_path / "x.npy")), 4)


def test_fields_that_come_and_go_are_named_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer_agent.data.lines.SAMPLE_RECORDS", 2)
    path = tmp_path / "x.jsonl"
    records = (
        [{"a": 1, "b": 2}] * 2 + [{"a": 1}] * 2 + [{"a": 1, "b": 2, "c": 3}] * 2 + [{"a": "one", "b": 2}] * 2
    )
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    reader = open_dataset(JsonLines(str(path)))
    for first, told in (
        (2, "records 2-3 have no column 'b'"),
        (4, "column 'c': .* record 4 has 3"),
        (6, "column 'a': .* record 6 has 'one'"),
    ):
        shard = reader.read(str(path), first, 2)
        # a script's own collate takes records as they are
        assert shard.minibatch(np.arange(2))[0] == records[first]
        with pytest.raises(DatasetError, match=rf"(?s)x\.jsonl.*{told.removeprefix('column ')}|{told}"):
            default_collate(shard.minibatch(np.arange(2)))


def test_records_of_a_scripts_own_make_one_column_of_whole_numbers():
    """default_collate, as scripts call it for lists of their own."""
    collated = default_collate([{"x": BIG, "y": 1}, {"x": 3, "y": 0.5}])
    assert (collated["x"].tolist(), collated["x"].dtype) == ([BIG, 3], torch.uint64)
    assert collated["y"].dtype == torch.float32
    with pytest.raises(
        DatasetError,
        match=r"column 'x': record 1 has 9007199254740993: float32 and int64 stand in one column",
    ):
        default_collate([{"x": np.float32(1)}, {"x": np.int64(2**53 + 1)}])
    objects = [{"x": np.array([1, 2], dtype=object)}, {"x": np.array([3, BIG], dtype=object)}]
    collated = default_collate(objects)
    assert (collated["x"].tolist(), collated["x"].dtype) == ([[1, 2], [3, BIG]], torch.uint64)
    with pytest.raises(DatasetError, match=r"column 'x': record \d has .*18446744073709551616"):
        default_collate([{"x": np.array([1, 2], dtype=object)}, {"x": np.array([2**64, 1], dtype=object)}])

"""A file that was replaced is noticed, also by one of the same size; a copy of it is not, whatever its
time."""

from __future__ import annotations

import os
import shutil
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest

from master_service.storage.counting import Heads
from master_service.storage.job_storage import count_records
from tests.equipment.replaced import replaced
from trireme_shared.datasets import dataset_files
from trireme_shared.datasets.dataset_files import (
    BLOCKS,
    END_BYTES,
    LOOK_S,
    WHOLE_BYTES,
    CountedFiles,
    stamp_of,
)
from trireme_shared.platform.storage import files as storage_files
from trireme_shared.protocol.records.datasets import Bytes, Csv, Custom, MapStyle, Npy


def large(seed: int, size: int = 4 * WHOLE_BYTES) -> bytes:
    return np.random.default_rng(seed).bytes(size)


@pytest.mark.parametrize("size", [1, 1000, WHOLE_BYTES, WHOLE_BYTES + 1, 4 * WHOLE_BYTES])
def test_another_content_of_the_same_size_has_another_stamp_and_a_copy_has_the_same(tmp_path, size):
    path, copy = tmp_path / "x", tmp_path / "y"
    path.write_bytes(large(1, size))
    before = stamp_of(str(path))
    shutil.copyfile(path, copy)
    os.utime(copy, (1, 1))
    assert stamp_of(str(copy)) == before
    path.write_bytes(large(2, size))
    assert stamp_of(str(path)) != before
    assert before.startswith(f"{size} content ")


def test_small_files_are_compared_whole_and_large_ones_at_their_ends_and_between(tmp_path):
    path, content = tmp_path / "x", bytearray(large(1, WHOLE_BYTES))
    path.write_bytes(content)
    before = stamp_of(str(path))
    for place in range(0, WHOLE_BYTES, 20_011):
        content[place] ^= 1
        path.write_bytes(content)
        assert stamp_of(str(path)) != before, place
        content[place] ^= 1
    content = bytearray(large(1))
    path.write_bytes(content)
    before, changed = stamp_of(str(path)), 0
    for place in (0, END_BYTES - 1, END_BYTES, len(content) // 2, len(content) - END_BYTES, len(content) - 1):
        content[place] ^= 1
        path.write_bytes(content)
        changed += stamp_of(str(path)) != before
        content[place] ^= 1
    assert changed >= 5, BLOCKS


def test_an_object_of_a_store_is_compared_by_its_tag_and_any_other_file_is_read(monkeypatch):
    with fsspec.open("memory://stamps/x", "wb") as file:
        file.write(b"one")
    assert stamp_of("memory://stamps/x").startswith("3 content ")
    assert stamp_of("memory://stamps/none") == ""
    monkeypatch.setattr("trireme_shared.datasets.dataset_files.files.size_and_tag", lambda _: (3, "abc"))
    assert stamp_of("s3://bucket/x") == "3 etag abc"


def test_the_tag_of_a_web_server_is_not_taken_since_mirrors_have_their_own(monkeypatch):
    info = {"type": "file", "size": 3, "ETag": '"abc"'}
    monkeypatch.setattr(storage_files, "_resolve", lambda url: (SimpleNamespace(info=lambda _: info), url))
    assert storage_files.size_and_tag("https://mirror/x") == (3, "")
    assert storage_files.size_and_tag("gs://bucket/x") == (3, "abc")


def test_a_file_of_a_storage_that_must_be_asked_is_looked_at_once_a_minute(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(dataset_files.clock, "monotonic", lambda: now[0])
    url, files = "memory://stamps/asked", CountedFiles(Bytes("memory://stamps/asked", record_bytes=1))

    def write(content: bytes) -> None:
        with fsspec.open(url, "wb") as file:
            file.write(content)

    write(b"ab")
    stamp = stamp_of(url)
    assert files.difference(url, stamp) is None
    write(b"ba")
    now[0] += LOOK_S - 1
    assert files.difference(url, stamp) is None
    now[0] += 2
    assert files.difference(url, stamp) is not None


def test_a_file_is_read_again_only_after_it_changed(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(b"ab")
    dataset, reads = Bytes(str(path), record_bytes=1), []
    (counted,) = count_records(dataset, 10).files
    files = CountedFiles(dataset)

    def noted(url: str) -> str:
        reads.append(url)
        return stamp_of(url)

    with replaced(dataset_files, "stamp_of", noted):
        for _ in range(3):
            assert files.difference(counted.path, counted.stamp) is None
        assert len(reads) == 1
        os.utime(path, (1, 1))  # touched: looked at, and still the same
        assert files.difference(counted.path, counted.stamp) is None
        assert len(reads) == 2
        path.write_bytes(b"ba")
        assert (found := files.difference(counted.path, counted.stamp)) is not None
    assert found.message.startswith(
        f"{path} is not the file whose records were counted when the job began: it is 2 bytes with digest"
    )
    assert "counted was 2 bytes with digest" in found.message
    path.unlink()
    assert files.difference(counted.path, counted.stamp) is None  # its reader says that it is gone


@pytest.mark.parametrize("names", ["x", "xy"])
def test_arrays_that_are_read_together_are_stamped_together(tmp_path, names):
    for name in names:
        np.save(tmp_path / f"{name}.npy", np.zeros((4, 2)))
    dataset = Npy(*(str(tmp_path / f"{name}.npy") for name in names), aligned=True)
    (counted,) = count_records(dataset, 10).files
    assert CountedFiles(dataset).difference(counted.path, counted.stamp) is None
    np.save(tmp_path / f"{names[-1]}.npy", np.ones((4, 2)))
    assert CountedFiles(dataset).difference(counted.path, counted.stamp) is not None


def test_a_file_that_is_replaced_while_it_is_counted_is_not_the_counted_one(tmp_path, monkeypatch):
    """It has the stamp of before: what was counted may be of either."""
    path = tmp_path / "x.csv"
    path.write_text("a\n1\n")
    before, dataset = stamp_of(str(path)), Csv(str(path))
    rows = Heads.rows

    def replacing(heads, file):
        rows(heads, file)
        path.write_text("a\n2\n")

    monkeypatch.setattr(Heads, "rows", replacing)
    (counted,) = count_records(dataset, 10).files
    assert counted.stamp == before
    assert CountedFiles(dataset).difference(counted.path, counted.stamp) is not None


def test_what_is_no_file_has_no_stamp(tmp_path, monkeypatch):
    (tmp_path / "stamped_reader.py").write_text(
        "items = [1, 2]\nclass reader:\n    count = staticmethod(lambda url: 2)\n"
        "    read = staticmethod(lambda url, first, count: iter(()))\n"
    )
    (tmp_path / "real").write_bytes(b"x")
    monkeypatch.syspath_prepend(tmp_path)
    found = [
        count_records(dataset, 10).files[0].stamp
        for dataset in (
            MapStyle("stamped_reader:items"),
            Custom("a table of some database", reader="stamped_reader:reader"),
            Custom(str(tmp_path / "real"), reader="stamped_reader:reader"),
        )
    ]
    assert found[:2] == ["", ""]
    assert found[2].startswith("1 content ")


def test_a_table_keeps_stamps_and_one_without_them_is_read(tmp_path):
    (tmp_path / "x.csv").write_text("a\n1\n")
    table = count_records(Csv(str(tmp_path / "x.csv")), 10)
    assert type(table).from_map(table.to_map(), table.digest) == table
    (file,) = table.files
    old = {"path": file.path, "records": file.records, "offsets": list(file.offsets)}
    assert type(file).from_map(old).to_map() == old
    assert table.locate(0).stamp == file.stamp

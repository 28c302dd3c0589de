"""Compressed files have the records of what they hold; a trainer decompresses each once."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import shutil
import subprocess
import sys

import fsspec
import numpy as np
import pyarrow as pa
import pytest

from master_service.storage.job_storage import count_records
from tests.equipment.small_disk import small_disk
from tests.trainer_agent.data.test_made_files import MADE, RECORDS, everything
from trainer_agent.data import open_dataset
from trireme_shared.platform.storage.compressed import Decompressed
from trireme_shared.protocol.errors import DatasetError, ResourceExhausted
from trireme_shared.protocol.records.datasets import Csv, JsonLines, TextLines, TFRecord, WebDataset

__all__ = ["small_disk"]

COMPRESSED = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda content: pa.compress(content, codec="zstd", asbytes=True),
}
NUMBERS = list(range(3000))
LINES = "".join(f"{number}\n" for number in NUMBERS).encode()


@pytest.mark.parametrize("suffix", COMPRESSED)
@pytest.mark.parametrize("streams", [1, 3])
def test_lines_of_one_or_several_compressed_streams_are_read(tmp_path, suffix, streams):
    length = -(-len(LINES) // streams)
    pieces = [LINES[start : start + length] for start in range(0, len(LINES), length)]
    path = tmp_path / f"lines.txt.{suffix}"
    path.write_bytes(b"".join(COMPRESSED[suffix](piece) for piece in pieces))
    assert [int(record["text"]) for record in everything(TextLines(str(path)), 700)] == NUMBERS


@pytest.mark.parametrize(
    ("kind", "name", "content", "expected"),
    [
        (Csv, "a.csv.gz", b"\xef\xbb\xbfid,x\n0,a\n1,b\n", [{"id": 0, "x": "a"}, {"id": 1, "x": "b"}]),
        (JsonLines, "a.jsonl.gz", b'{"a": 1}\n\n{"a": 2}', [{"a": 1}, {"a": 2}]),
    ],
)
def test_rows_and_objects_are_read(tmp_path, kind, name, content, expected):
    (tmp_path / name).write_bytes(gzip.compress(content))
    assert everything(kind(str(tmp_path / name)), 1) == expected


@pytest.mark.parametrize(("kind", "name"), [(TFRecord, "ids.tfrecord"), (WebDataset, "ids.tar")])
@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_binary_records_are_read(tmp_path, kind, name, suffix):
    path = tmp_path / f"{name}.{suffix}"
    path.write_bytes(COMPRESSED[suffix]((MADE / name).read_bytes()))
    plain, found = everything(kind(str(MADE / name))), everything(kind(str(path)))
    assert len(found) == RECORDS
    assert all(
        np.array_equal(one[column], other[column])
        for one, other in zip(plain, found, strict=True)
        for column in one
    )


def test_a_file_is_decompressed_once_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    for name in "abc":
        (tmp_path / f"{name}.txt.gz").write_bytes(gzip.compress(LINES))
    kept = Decompressed(kept_bytes=2 * len(LINES))
    for name in "aabbaac":
        with kept.opened(str(tmp_path / f"{name}.txt.gz")) as source:
            source.seek(2)
            assert source.read(4) == LINES[2:6]
    assert kept.decompressed == 3
    with kept.opened(str(tmp_path / "b.txt.gz")) as source:  # b was used longest ago, and c took its place
        source.seek(0)
        assert source.read() == LINES
    assert kept.decompressed == 4
    assert list((tmp_path / "temporary").iterdir()) == []


def random_lines(path, count):
    """A compressed file of that many lines of 1,024 bytes, and what it holds."""
    content = b"".join(os.urandom(512).hex().encode()[:1023] + b"\n" for _ in range(count))
    path.write_bytes(gzip.compress(content, 1))
    return content


@pytest.fixture
def small_temporary(small_disk, monkeypatch):
    """The folder of temporary files on a disk of 512 KiB."""
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))
    return small_disk


def test_a_full_folder_of_temporary_files_is_told_with_the_file_and_what_to_do(tmp_path, small_temporary):
    path = tmp_path / "large.txt.gz"
    random_lines(path, 3000)
    with pytest.raises(ResourceExhausted) as told:
        open_dataset(TextLines(str(path))).read(str(path), 0, 5, 0)
    assert told.value.message.startswith(
        f"{small_temporary} is full: {path} is read by way of a temporary file there"
    )
    assert (
        "needs at least 1048576 bytes, and there is room for 524288; free space, or set TMPDIR"
        in told.value.message
    )
    assert free_bytes(small_temporary) == 512 << 10


def test_files_kept_from_before_make_room_for_the_next_one(tmp_path, small_temporary):
    contents = {tmp_path / f"{name}.txt.gz": random_lines(tmp_path / f"{name}.txt.gz", 300) for name in "abc"}
    kept = Decompressed()
    for path in [*contents, *contents]:
        with kept.opened(str(path)) as source:
            source.seek(0)
            assert source.read() == contents[path]


def test_a_killed_process_leaves_none_of_its_temporary_files(tmp_path, small_temporary):
    path = tmp_path / "lines.txt.gz"
    random_lines(path, 300)
    program = (
        "import sys, time\nfrom trireme_shared.platform.storage.compressed import "
        "Decompressed\nkept = Decompressed()\n"
        f"with kept.opened({str(path)!r}): print('opened', flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "TMPDIR": str(small_temporary)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout.readline() == b"opened\n"
        assert free_bytes(small_temporary) < 300 << 10, "it takes room while it is used"
        process.kill()
    assert free_bytes(small_temporary) == 512 << 10
    assert list(small_temporary.iterdir()) == []


def free_bytes(folder):
    return shutil.disk_usage(folder).free


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_what_is_damaged_or_cut_off_is_named_with_its_place(tmp_path, suffix):
    content = COMPRESSED[suffix](LINES)
    cut = tmp_path / f"cut.txt.{suffix}"
    cut.write_bytes(content[:-30])
    other = tmp_path / f"other.txt.{suffix}"
    other.write_bytes(b"this was never compressed")
    for path in (cut, other):
        with pytest.raises(
            DatasetError, match=rf"{path.name} is damaged or cut off behind \d+ decompressed bytes"
        ):
            count_records(TextLines(str(path)), 5)
        with pytest.raises(DatasetError, match=rf"{path.name} is damaged or cut off"):
            open_dataset(TextLines(str(path))).read(str(path), 0, 5)


def test_a_compressed_file_of_another_file_system_is_read():
    fsspec.filesystem("memory").pipe_file("memory://compressed/a.txt.gz", gzip.compress(LINES))
    assert len(everything(TextLines("memory://compressed/a.txt.gz"), 1000)) == len(NUMBERS)

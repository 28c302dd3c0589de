"""Files that the formats' own libraries made (made/make.py), or that follow the format's definition where no
library can be had: every record, from every place; what is damaged or cut off is named with its byte."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import struct
import tarfile
import zlib
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from google_crc32c import value as crc32c
from PIL import Image

from master_service.storage.job_storage import count_records
from trainer_agent.data import open_dataset
from trireme_shared.datasets.record_files import masked
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import (
    Dataset,
    HuggingFace,
    ImageFolder,
    RecordIO,
    TFRecord,
    WebDataset,
)

MADE = Path(__file__).parent / "made"
RECORDS = 24


def everything(dataset: Dataset, task_records: int = 5) -> list[dict]:
    """The records of all tasks, in the order of the table."""
    table = count_records(dataset, task_records)
    reader, found = open_dataset(dataset), []
    for task in range(table.tasks):
        where = table.locate(task)
        shard = reader.read(where.file, where.first, where.count, where.offset)
        found += shard.records(np.arange(len(shard)))
    assert len(found) == table.records
    return found


def write_recordio(path: Path, records: list[bytes], compressor: int, per_chunk: int = 7) -> None:
    """As wangkuiyi/recordio defines it."""
    with path.open("wb") as file:
        for start in range(0, len(records), per_chunk):
            chunk = records[start : start + per_chunk]
            content = b"".join(struct.pack("<I", len(record)) + record for record in chunk)
            if compressor == 1:
                body = b"crc!" + bytes(pa.compress(content, codec="snappy", asbytes=True))
                content = b"\xff\x06\x00\x00sNaPpY" + b"\x00" + len(body).to_bytes(3, "little") + body
            elif compressor == 2:
                content = gzip.compress(content)
            file.write(
                struct.pack("<5I", 0x01020304, zlib.crc32(content), compressor, len(content), len(chunk))
                + content
            )


def write_tar(path: Path, files: dict[str, bytes], layout: int = tarfile.USTAR_FORMAT) -> None:
    with tarfile.open(path, "w", format=layout) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


@pytest.mark.parametrize("task_records", [1, 5, 24, 100])
def test_examples_of_a_tfrecord_file_have_their_values(task_records):
    found = everything(TFRecord(str(MADE / "ids.tfrecord")), task_records)
    assert [(record["id"], record["negative"], record["text"]) for record in found] == [
        (i, -i, f"record {i}".encode()) for i in range(RECORDS)
    ]
    assert all(
        np.array_equal(record["x"], np.array([i / 4, -i / 4, 0.5], np.float32))
        for i, record in enumerate(found)
    )
    assert list(found[0]) == ["id", "negative", "text", "x"]


def test_a_feature_can_stay_an_array_and_a_record_as_it_is():
    assert everything(TFRecord(str(MADE / "ids.tfrecord"), lists=("id",)))[3]["id"].tolist() == [3]
    raw = everything(TFRecord(str(MADE / "ids.tfrecord"), decode="bytes"))
    assert b"record 23" in raw[23]["bytes"]


@pytest.mark.parametrize("compressor", [0, 1, 2], ids=["plain", "snappy", "gzip"])
def test_records_of_recordio_chunks_are_read(tmp_path, compressor):
    expected = [b"r%d" % i * (i % 5) for i in range(RECORDS)]
    write_recordio(tmp_path / "a.recordio", expected, compressor)
    assert [record["bytes"] for record in everything(RecordIO(str(tmp_path / "a.recordio")))] == expected
    reader = open_dataset(RecordIO(str(tmp_path / "a.recordio")))
    shard = reader.read(str(tmp_path / "a.recordio"), 6, 10)  # two borders of chunks
    assert [record["bytes"] for record in shard.records(np.arange(10))] == expected[6:16]


def test_samples_of_a_webdataset_are_decoded():
    found = everything(WebDataset(str(MADE / "ids.tar")))
    assert [(record["__key__"], record["cls"]) for record in found] == [
        (f"samples/{i:04}", i) for i in range(RECORDS)
    ]
    assert all(
        np.array_equal(record["png"], np.full((3, 4, 6), i, np.uint8)) for i, record in enumerate(found)
    )
    small = everything(WebDataset(str(MADE / "ids.tar"), image_size=(2, 2)))
    assert small[5]["png"].tolist() == [[[5, 5], [5, 5]]] * 3
    assert everything(WebDataset(str(MADE / "ids.tar"), decode=False))[7]["cls"] == b"7"


@pytest.mark.parametrize("layout", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_other_columns_of_a_tar_are_read(tmp_path, layout):
    deep = "d" * 90 + "/" + ("é" if layout != tarfile.USTAR_FORMAT else "e") * 60 + "/"
    array = io.BytesIO()
    np.save(array, np.arange(3))
    files = {
        f"{deep}a.json": b'{"n": 1}',
        f"{deep}a.seg.npy": array.getvalue(),
        f"{deep}b.txt": b"two",
        "README": b"no sample",
    }
    write_tar(tmp_path / "a.tar", files, layout)
    first, second = everything(WebDataset(str(tmp_path / "a.tar")), 1)
    assert (first["__key__"], first["json"], first["seg.npy"].tolist()) == (f"{deep}a", {"n": 1}, [0, 1, 2])
    assert second == {"__key__": f"{deep}b", "txt": "two"}


def damaged(path: Path, made: bytes, at: int) -> str:
    path.write_bytes(made[:at] + bytes([made[at] ^ 0x55]) + made[at + 1 :])
    return str(path)


def test_damage_in_a_tfrecord_file_is_named_with_its_byte(tmp_path):
    made = (MADE / "ids.tfrecord").read_bytes()
    second = 16 + struct.unpack_from("<Q", made)[0]
    path = damaged(tmp_path / "length", made, second + 2)
    with pytest.raises(
        DatasetError, match=rf"length is damaged at byte {second}: the checksum of its length differs"
    ):
        count_records(TFRecord(path), 5)
    path = damaged(tmp_path / "content", made, second + 20)
    with pytest.raises(
        DatasetError, match=rf"content is damaged at byte {second}: the record's checksum differs"
    ):
        everything(TFRecord(path))
    (tmp_path / "cut").write_bytes(made[:-3])
    with pytest.raises(
        DatasetError, match=r"cut is cut off: the record that starts at byte \d+ is not whole"
    ):
        count_records(TFRecord(str(tmp_path / "cut")), 5)
    (tmp_path / "text").write_text("a text, of more than twelve bytes")
    with pytest.raises(DatasetError, match="it is no TFRecord file"):
        count_records(TFRecord(str(tmp_path / "text")), 5)


def test_damage_in_a_recordio_file_is_named_with_its_byte(tmp_path):
    write_recordio(tmp_path / "whole", [b"record %d" % i for i in range(RECORDS)], 0)
    made = (tmp_path / "whole").read_bytes()
    second = 20 + struct.unpack_from("<I", made, 12)[0]
    path = damaged(tmp_path / "head", made, second)
    with pytest.raises(DatasetError, match=rf"the chunk at byte {second}: it begins with 0x01020351"):
        count_records(RecordIO(path), 5)
    path = damaged(tmp_path / "content", made, second + 30)
    with pytest.raises(
        DatasetError, match=rf"the chunk at byte {second}: the checksum of its content differs"
    ):
        everything(RecordIO(path))
    (tmp_path / "cut").write_bytes(made[:-3])
    with pytest.raises(DatasetError, match=r"the chunk at byte \d+: the file ends within its content"):
        count_records(RecordIO(str(tmp_path / "cut")), 5)


def test_damage_in_a_tar_is_named_with_its_byte(tmp_path):
    made = (MADE / "ids.tar").read_bytes()
    path = damaged(tmp_path / "header", made, 2048 + 5)  # tarfile itself takes it for the archive's end
    with pytest.raises(DatasetError, match=r"header is damaged at byte 2048: no header of a tar file"):
        count_records(WebDataset(path), 5)
    (tmp_path / "cut").write_bytes(made[: 2048 + 512])
    with pytest.raises(DatasetError, match=r"cut is cut off: the file that starts at byte 2048 is not whole"):
        count_records(WebDataset(str(tmp_path / "cut")), 5)
    (tmp_path / "between").write_bytes(made[:2048])
    with pytest.raises(DatasetError, match=r"between is cut off: it ends at byte 2048 without the end mark"):
        count_records(WebDataset(str(tmp_path / "between")), 5)
    write_tar(tmp_path / "twice.tar", {"a.txt": b"1", "A.txt": b"2", "a.TXT": b"3", "a.txt ": b"4"})
    count_records(WebDataset(str(tmp_path / "twice.tar")), 5)
    write_tar(tmp_path / "same.tar", {"a.txt": b"1", "a.TXT": b"2"})
    with pytest.raises(DatasetError, match=r"byte 1024 is a second 'txt' of the key 'a'"):
        count_records(WebDataset(str(tmp_path / "same.tar")), 5)
    write_tar(tmp_path / "image.tar", {"a.png": b"no image", "b.json": b"{"})
    with pytest.raises(DatasetError, match=r"a\.png \(byte 512\) is no image that can be read"):
        everything(WebDataset(str(tmp_path / "image.tar")), 1)
    write_tar(tmp_path / "json.tar", {"b.json": b"{"})
    with pytest.raises(DatasetError, match=r"b\.json \(byte 512\) cannot be read as json"):
        everything(WebDataset(str(tmp_path / "json.tar")), 1)


def test_a_record_that_is_no_example_says_what_to_do(tmp_path):
    record = json.dumps({"a": 1}).encode()
    head = struct.pack("<Q", len(record))
    frame = (
        head + struct.pack("<I", masked(crc32c(head))) + record + struct.pack("<I", masked(crc32c(record)))
    )
    (tmp_path / "json.tfrecord").write_bytes(frame)
    with pytest.raises(DatasetError, match=r"record 0 is not a tf\.train\.Example") as caught:
        everything(TFRecord(str(tmp_path / "json.tfrecord")))
    assert 'decode="bytes"' in str(caught.value.hint)


def test_a_file_that_became_shorter_is_named_with_both_counts():
    for dataset, file in [(TFRecord, "ids.tfrecord"), (WebDataset, "ids.tar")]:
        path = str(MADE / file)
        with pytest.raises(DatasetError, match=r"ends at record 24, but records 20 to 29 were counted"):
            open_dataset(dataset(path)).read(path, 20, 10)


def test_a_saved_hugging_face_dataset_is_read_as_its_library_would():
    found = everything(HuggingFace(str(MADE / "ids_hf"), split="train"))
    assert [(row["id"], row["label"], row["text"]) for row in found] == [
        (i, i % 2, f"record {i}") for i in range(RECORDS)
    ]
    assert all(np.array_equal(row["matrix"], np.full((2, 3), i, np.float32)) for i, row in enumerate(found))
    assert all(np.array_equal(row["image"], np.full((3, 4, 6), i, np.uint8)) for i, row in enumerate(found))
    assert list(found[0]) == ["id", "label", "matrix", "image", "text"]
    chosen = everything(HuggingFace(str(MADE / "ids_hf" / "train"), columns=("text", "image"), decode=False))
    assert list(chosen[0]) == ["text", "image"]
    assert chosen[0]["image"]["bytes"].startswith(b"\x89PNG")


def test_a_saved_hugging_face_dataset_is_read_from_another_file_system():
    for path in (MADE / "ids_hf" / "train").iterdir():
        fsspec.filesystem("memory").pipe_file(f"memory://saved/{path.name}", path.read_bytes())
    assert [row["id"] for row in everything(HuggingFace("memory://saved"))] == list(range(RECORDS))


def test_what_is_no_saved_dataset_says_what_to_do(tmp_path):
    folder = str(MADE / "ids_hf")
    for dataset, message in [
        (HuggingFace(folder), "has several splits; it has train"),
        (HuggingFace(folder, split="test"), "has no split 'test'; it has train"),
        (HuggingFace(f"{folder}/train", split="test"), "is one dataset .* so it has no split 'test'"),
        (HuggingFace(str(tmp_path)), "is no saved dataset: it has no state.json"),
        (HuggingFace(f"{folder}/train", columns=("idd",)), "has no column 'idd'; it has id, label"),
    ]:
        with pytest.raises(DatasetError, match=message):
            everything(dataset)
    shutil.copytree(MADE / "ids_hf" / "train", tmp_path / "cut")
    last = tmp_path / "cut" / "data-00001-of-00002.arrow"
    last.write_bytes(last.read_bytes()[:-600])
    with pytest.raises(
        DatasetError, match=r"data-00001-of-00002\.arrow is damaged or cut off behind record 0"
    ):
        count_records(HuggingFace(str(tmp_path / "cut")), 5)


def write_images(root: Path) -> None:
    for i in range(RECORDS):
        path = root / ("dog" if i % 2 else "cat") / "deeper" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 6, 3), i, np.uint8)).save(path)
    (root / "cat" / "notes.txt").write_text("no image")


def test_images_in_folders_are_labelled_by_their_folder_and_mixed(tmp_path):
    write_images(tmp_path)
    found = everything(ImageFolder(str(tmp_path)))
    numbers = [int(record["image"][0, 0, 0]) for record in found]
    assert sorted(numbers) == list(range(RECORDS))
    assert [record["label"] for record in found] == [number % 2 for number in numbers]
    assert {record["label"] for record in found[:8]} == {0, 1}
    assert [
        int(record["image"][0, 0, 0])
        for record in everything(ImageFolder(str(tmp_path), image_size=(2, 2)), 7)
    ] == numbers


def test_a_folder_of_images_that_changed_or_is_damaged_is_named(tmp_path):
    write_images(tmp_path)
    table = count_records(ImageFolder(str(tmp_path)), 5)
    (tmp_path / "cat" / "deeper" / "0.png").rename(tmp_path / "cat" / "deeper" / "zero.png")
    with pytest.raises(DatasetError, match="has other images than were counted: 24 here"):
        open_dataset(ImageFolder(str(tmp_path))).read(table.files[0].path, 0, 1)
    (tmp_path / "dog" / "deeper" / "1.png").write_bytes(b"\x89PNG cut")
    with pytest.raises(DatasetError, match=r"deeper/1\.png: the file is no image that can be read"):
        everything(ImageFolder(str(tmp_path)))
    (tmp_path / "none").mkdir()
    with pytest.raises(DatasetError, match="none has no folders with images"):
        count_records(ImageFolder(str(tmp_path / "none")), 5)
    with pytest.raises(DatasetError, match="nowhere does not exist"):
        count_records(ImageFolder(str(tmp_path / "nowhere")), 5)

"""safetensors streams: the library reads what is written here and the other way round; whatever is broken is
refused."""

from __future__ import annotations

import hashlib
import json

import pytest
import safetensors.torch
import torch
import xxhash

from trireme_shared.platform.storage import tensor_file
from trireme_shared.platform.storage.direct_file import LARGEST_LENT
from trireme_shared.platform.storage.tensor_file import Entry
from trireme_shared.protocol.errors import BadFrame

TENSORS = {
    "a": torch.arange(5, dtype=torch.float32),
    "b.step": torch.tensor(3.0),
    "c": torch.arange(3, dtype=torch.int64),
    "d": torch.arange(4, dtype=torch.bfloat16),
    "e": torch.arange(6, dtype=torch.float16).reshape(2, 3),
}


def view(tensor):
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def written(path, checksum="xxh3-128"):
    items = [
        (Entry(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)), view(t)) for n, t in TENSORS.items()
    ]
    return tensor_file.write(str(path), {"step": "7"}, items, checksum=checksum)


def hexdigest(checksum, content):
    return (
        xxhash.xxh3_128_hexdigest(content)
        if checksum == "xxh3-128"
        else hashlib.new(checksum, content).hexdigest()
    )


def read(path, checksum="xxh3-128"):
    found = {}

    def sink(entry):
        found[entry.name] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        return view(found[entry.name])

    return found, tensor_file.read(str(path), sink, checksum)


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) and value.dtype == other[name].dtype for name, value in one.items()
    )


def test_the_library_reads_what_is_written(tmp_path):
    summary = written(tmp_path / "x.safetensors")
    content = (tmp_path / "x.safetensors").read_bytes()
    assert same(safetensors.torch.load_file(tmp_path / "x.safetensors"), TENSORS)
    assert (summary.checksum, summary.bytes) == (
        f"xxh3-128:{xxhash.xxh3_128_hexdigest(content)}",
        len(content),
    )
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"step": "7"}


def test_what_the_library_wrote_is_read(tmp_path):
    safetensors.torch.save_file(TENSORS, tmp_path / "x.safetensors", {"step": "7"})
    found, summary = read(tmp_path / "x.safetensors")
    assert same(found, TENSORS)
    assert summary.metadata == {"step": "7"}


@pytest.mark.parametrize("checksum", tensor_file.CHECKSUMS)
def test_any_flipped_byte_changes_the_checksum(tmp_path, checksum):
    path = tmp_path / "x"
    summary = written(path, checksum)
    assert summary.checksum == f"{checksum}:{hexdigest(checksum, path.read_bytes())}"
    content = bytearray(path.read_bytes())
    first = len(content) - summary.bytes + 8 + int.from_bytes(content[:8], "little")
    for at in range(first, len(content)):
        content[at] ^= 1
        path.write_bytes(content)
        assert read(path, checksum)[1].checksum != summary.checksum
        content[at] ^= 1


def test_a_tensor_of_several_chunks_goes_whole_through_the_checksum(tmp_path):
    value = torch.arange(3 * tensor_file.CHUNK_BYTES // 4 + 5, dtype=torch.float32)
    path = tmp_path / "x"
    view = memoryview(value.view(torch.uint8).numpy())
    summary = tensor_file.write(
        str(path), {}, [(tensor_file.Entry("a", "float32", tuple(value.shape)), view)]
    )
    assert summary.checksum == f"xxh3-128:{xxhash.xxh3_128_hexdigest(path.read_bytes())}"
    assert tensor_file.read(str(path), lambda _: None) == summary


@pytest.mark.parametrize(("url", "lends"), [("{folder}/y", True), ("memory://made/y", False)])
def test_tensors_that_are_made_in_the_files_own_memory_are_the_same_file(tmp_path, url, lends):
    """A local file lends them memory; one that is too large for it, or has no such memory, is written from
    their own."""
    values = [
        torch.arange(count, dtype=torch.int64)
        for count in (3, 1 << 17, LARGEST_LENT // 8, LARGEST_LENT // 8 + 1)
    ]
    entries = [Entry(f"t{number}", "int64", (len(value),)) for number, value in enumerate(values)]
    places = []

    def make(value):
        def made(place):
            places.append(place is not None)
            if place is None:
                return view(value)
            place[:] = view(value)
            return place

        return made

    url = url.format(folder=tmp_path)
    copied = tensor_file.write(f"{tmp_path}/x", {}, list(zip(entries, map(view, values), strict=True)))
    found = tensor_file.write(url, {}, list(zip(entries, map(make, values), strict=True)))
    assert found == copied
    assert tensor_file.read(url, lambda _: None) == found
    assert places == [lends, lends, lends, False]


def test_a_round_trip_gives_the_same_checksum(tmp_path):
    summary = written(tmp_path / "x")
    found, again = read(tmp_path / "x")
    assert again == summary
    assert same(found, TENSORS)


def test_tensors_nobody_wants_are_read_past(tmp_path):
    summary = written(tmp_path / "x")
    assert tensor_file.read(str(tmp_path / "x"), lambda _: None) == summary


def test_every_truncation_and_any_tail_is_refused(tmp_path):
    written(tmp_path / "x")
    content = (tmp_path / "x").read_bytes()
    for end in range(len(content)):
        (tmp_path / "y").write_bytes(content[:end])
        with pytest.raises(BadFrame):
            read(tmp_path / "y")
    (tmp_path / "y").write_bytes(content + b"x")
    with pytest.raises(BadFrame, match="goes on after"):
        read(tmp_path / "y")


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}',
        json.dumps({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}).encode(),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path, header):
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(BadFrame):
        read(tmp_path / "x")


def test_a_header_too_large_is_refused_before_it_is_read(tmp_path):
    (tmp_path / "x").write_bytes((1 << 60).to_bytes(8, "little") + bytes(100))
    with pytest.raises(BadFrame, match="at most"):
        read(tmp_path / "x")

"""Files written past the page cache have the bytes they were given, whatever the file system refuses."""

from __future__ import annotations

import errno
import fcntl
import os
import random

import pytest

from trireme_shared.platform.storage.direct_file import BUFFER_BYTES, EARLY_BYTES, LARGEST_LENT, DirectFile

SIZES = (0, 1, 511, 4096, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1, 2 * BUFFER_BYTES + 4097)


def written(path, content: bytes, piece: int) -> bytes:
    with DirectFile(path) as file:
        for first in range(0, len(content), piece):
            assert file.write(content[first : first + piece]) == len(content[first : first + piece])
        file.finish()
    return path.read_bytes()


@pytest.fixture
def refusing(monkeypatch) -> None:
    """A file system that does not open with O_DIRECT, and has made the file by then, as some do."""
    really = os.open

    def refuse(path, flags, *more, **named):
        descriptor = really(path, flags, *more, **named)
        if flags & os.O_DIRECT:
            os.close(descriptor)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return descriptor

    monkeypatch.setattr(os, "open", refuse)


@pytest.fixture
def half_refusing(monkeypatch) -> None:
    """One that takes half of each write, and no write at what is no multiple of a block."""
    really = os.write

    def half(descriptor, data):
        direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        if direct and os.lseek(descriptor, 0, os.SEEK_CUR) % 4096:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if not direct:
            return really(descriptor, data)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)
        count = really(descriptor, data[: len(data) // 2 + 1])
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
        return count

    monkeypatch.setattr(os, "write", half)


@pytest.mark.parametrize("system", [None, "refusing", "half_refusing"])
@pytest.mark.parametrize("size", SIZES)
def test_all_bytes_arrive(tmp_path, request, size, system):
    content = random.Random(size).randbytes(size)
    if system is not None:
        request.getfixturevalue(system)
    for piece in (1 << 20, BUFFER_BYTES, 3 * BUFFER_BYTES):
        assert written(tmp_path / f"file-{piece}", content, piece) == content


@pytest.mark.parametrize("system", [None, "refusing", "half_refusing"])
def test_lent_memory_is_a_part_of_the_file_where_it_was_lent(tmp_path, request, system):
    """Pieces in every order: lent ones, written ones, some after which nothing is lent, and one that is
    larger than what can be lent."""
    if system is not None:
        request.getfixturevalue(system)
    chosen, path = random.Random(5), tmp_path / "file"
    lent, content = 0, []
    with DirectFile(path) as file:
        for size in (
            8,
            EARLY_BYTES - 8,
            4088,
            24,
            BUFFER_BYTES,
            EARLY_BYTES + 16,
            5,
            16,
            3,
            LARGEST_LENT,
            8,
            40,
        ):
            content.append(chosen.randbytes(size))
            place = file.lend(size)
            if place is None:
                file.write(content[-1])
                continue
            assert place.nbytes == size
            place[:] = content[-1]
            file.give_back(size)
            lent += 1
        file.finish()
    assert path.read_bytes() == b"".join(content)
    assert lent == 9, "all but the one that is too large, and two that would begin within a word"


def test_nothing_is_lent_that_a_buffer_has_no_room_for(tmp_path):
    with DirectFile(tmp_path / "file") as file:
        assert file.lend(LARGEST_LENT + 1) is None
        file.write(b"12345")
        assert file.lend(8) is None, "it would begin within a word"


def test_whole_buffers_go_past_the_cache_where_the_file_system_can(tmp_path):
    path = tmp_path / "file"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system knows no O_DIRECT")
    path.unlink()
    with DirectFile(path) as file:
        file.write(bytes(2 * BUFFER_BYTES))
        assert path.stat().st_size >= BUFFER_BYTES, "a full buffer is written at once"
        assert fcntl.fcntl(file.descriptor, fcntl.F_GETFL) & os.O_DIRECT
        file.finish()


def test_a_name_that_is_taken_stays(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError):
        DirectFile(path)
    assert path.read_bytes() == b"old"


def full(descriptor, data):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"), DirectFile(tmp_path / "file") as file:
        file.write(bytes(BUFFER_BYTES))
        file.finish()


def test_a_full_disk_is_told_while_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"), DirectFile(tmp_path / "file") as file:
        file.write(bytes(2 * BUFFER_BYTES))

"""Stamps: what a file was when its records were counted, so that whoever opens it later knows whether it is still the same.

    an object of a store ─► size and ETag
    any other file       ─► size and a digest of its content: all of it up to WHOLE_BYTES, else its head, its tail and blocks between

Times of change are in no stamp: hosts have copies of their own, and a copy has its own time. So a large file that is overwritten in
place by as many bytes, alike in head, tail and all sampled blocks, keeps its stamp.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from threading import Lock
from typing import BinaryIO

from trireme_shared.platform.runtime import clock
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import Dataset, ImageFolder, Npy

WHOLE_BYTES, END_BYTES, BLOCK_BYTES = 256 << 10, 64 << 10, 4 << 10
BLOCKS, REMOTE_BLOCKS = 16, 2
LOOK_S = 60.0  # between two looks at a file of a storage that must be asked
KNOWN_FILES = 1 << 16


def stamp_of(url: str) -> str:
    """The stamp of a file; "" if there is no such file (a user's reader may be given anything). Raises what `files.reading` does."""
    with files.reading(url, "a file"):
        try:
            size, tag = files.size_and_tag(url)
            if tag:
                return f"{size} etag {tag}"
            with files.open_read(url) as source:
                return f"{size} content {_digest(source, size, BLOCKS if files.local_path(url) else REMOTE_BLOCKS)}"
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return ""


def joined(stamps: list[str]) -> str:
    """One stamp of files that are read together."""
    return f"{len(stamps)} files {hashlib.blake2b(' | '.join(stamps).encode(), digest_size=16).hexdigest()}"


class CountedFiles:
    """Compares files of one dataset with their stamps. Its methods block, and may be called from several threads."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._known: OrderedDict[str, tuple[object, float]] = OrderedDict()
        self._lock = Lock()

    def difference(self, file: str, stamp: str) -> DatasetError | None:
        """What to tell if `file` is not the one with this stamp. A file that was looked at and has not changed since is not read again."""
        if not stamp or isinstance(self._dataset, ImageFolder):
            return None
        together = self._together(file)
        now, state = clock.monotonic(), tuple(map(_state, together))
        with self._lock:
            seen, at = self._known.get(file, (None, 0.0))
        if seen == (stamp, state) and (all(state) or now - at < LOOK_S):
            return None
        stamps = list(map(stamp_of, together))
        found = stamps[0] if len(stamps) == 1 else joined(stamps)
        if not all(stamps):
            return None  # it is gone: its reader says so
        if found != stamp:
            return _differs(file, stamp, found)
        with self._lock:
            self._known[file] = (stamp, state), now
            self._known.move_to_end(file)
            if len(self._known) > KNOWN_FILES:
                self._known.popitem(last=False)
        return None

    def _together(self, file: str) -> list[str]:
        """The files that are read with this one."""
        if isinstance(self._dataset, Npy) and self._dataset.aligned:
            return [found for url in self._dataset.urls for found in files.expand(url)]
        return [file]


def _differs(file: str, counted: str, found: str) -> DatasetError:
    msg = f"{file} is not the file whose records were counted when the job began: it is {_said(found)}, counted was {_said(counted)}"
    hint = "put the counted file back and start the job again, or start a new job for the new file"
    return DatasetError(msg, hint=hint, url=file, counted=counted, found=found)


def _said(stamp: str) -> str:
    size, kind, digest = stamp.split(" ", 2)
    return f"{size} {'files' if kind == 'files' else 'bytes'} with {'ETag' if kind == 'etag' else 'digest'} {digest}"


def _digest(source: BinaryIO, size: int, blocks: int) -> str:
    whole = hashlib.blake2b(digest_size=16)
    if size <= WHOLE_BYTES:
        whole.update(source.read())
        return whole.hexdigest()
    between = size - 2 * END_BYTES - BLOCK_BYTES
    places = [END_BYTES + between * number // max(blocks - 1, 1) for number in range(blocks)]
    for place, count in ((0, END_BYTES), *((place, BLOCK_BYTES) for place in places), (size - END_BYTES, END_BYTES)):
        source.seek(place)
        whole.update(source.read(count))
    return whole.hexdigest()


def _state(file: str) -> object:
    """What changes when a local file is written or replaced; None for any other file, or if there is none."""
    local = files.local_path(file)
    if local is None:
        return None
    try:
        found = os.stat(local)  # noqa: PTH116  once a task
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

"""The files of a dataset, in the order in which its records are numbered: the same for the master and for a
trial of a script; and stamps: what a file was when its records were counted, so that whoever opens it later
knows whether it is still the same.

    an object of a store ─► size and ETag
    any other file       ─► size and a digest of its content: all of it up to WHOLE_BYTES, else its head, its
        tail and blocks between

Times of change are in no stamp: hosts have copies of their own, and a copy has its own time. So a large file
that is overwritten in place by as many bytes, alike in head, tail and all sampled blocks, keeps its stamp.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, BinaryIO, TypeVar

from trireme_shared.platform.runtime import clock
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import (
    Dataset,
    HuggingFace,
    ImageFolder,
    IterableStyle,
    Npy,
)

T = TypeVar("T")

_HINT = "check the path that dataset() returns (relative ones start at the working directory)"


def files_of(dataset: Dataset) -> list[str]:
    """Raises DatasetError if a URL matches no file. What names code is not looked for."""
    if isinstance(dataset, HuggingFace):
        return [file for folder in dataset.urls for file in arrow_files(folder, dataset.split)]
    if isinstance(dataset, ImageFolder):
        return list(dataset.urls)
    if isinstance(dataset, IterableStyle):
        return list(dataset.shard_names)
    chosen: list[str] = []
    for url in dataset.urls:
        as_it_is = dataset.names_code and not files.is_glob(url)
        chosen += [url] if as_it_is else files.expand_some(url, _HINT)
    return chosen


def from_first_file(dataset: Dataset, read: Callable[[str], Sequence[T]]) -> tuple[str, Sequence[T]]:
    """(file, what `read(file)` gives) of the first file that gives any; ("", ()) if there is none. Raises
    DatasetError if no file matches, and what `read` raises, but for files without a record."""
    for file in files_of(dataset):
        try:
            found = read(file)
        except DatasetError as error:
            if error.details.get("records") != 0:
                raise
            continue
        if found:
            return file, found
    return "", ()


def arrow_files(folder: str, split: str | None) -> list[str]:
    """Of a saved Dataset, or of the `split` of a saved DatasetDict. Raises DatasetError."""
    with files.reading(folder, "a saved dataset"):
        splits = _json(files.join(folder, "dataset_dict.json"))
        if splits is not None:
            names = ", ".join(map(str, splits["splits"]))
            if split not in splits["splits"]:
                said = f"has no split {split!r}" if split else "has several splits"
                msg = f"{folder} {said}; it has {names}"
                raise DatasetError(msg, hint='choose one: HuggingFace(folder, split="train")', url=folder)
            folder = files.join(folder, str(split))
        elif split is not None:
            msg = f"{folder} is one dataset (it has no dataset_dict.json), so it has no split {split!r}"
            raise DatasetError(msg, hint="leave split out", url=folder)
        state = _json(files.join(folder, "state.json"))
        if state is None:
            msg = f"{folder} is no saved dataset: it has no state.json"
            hint = (
                "give a folder that dataset.save_to_disk(folder) wrote; Parquet files of a hub's "
                "dataset are read by Parquet"
            )
            raise DatasetError(msg, hint=hint, url=folder)
        if state.get("_indices_data_files") or state.get("_indices_files"):
            msg = f"{folder} was saved with an order of rows beside them"
            raise DatasetError(msg, hint="save dataset.flatten_indices()", url=folder)
        return [files.join(folder, file["filename"]) for file in state["_data_files"]]


def _json(url: str) -> dict[str, Any] | None:
    """None if there is no such file."""
    try:
        found: dict[str, Any] = json.loads(files.read_bytes(url))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found


SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
MOST_IMAGES = 10_000_000
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class ImageListing:
    """`names`: relative to the root, in the order of records; `classes`: sorted; `digest`: of all names."""

    names: list[str]
    classes: list[str]
    digest: str

    def stamped(self, root: str) -> str:
        """The root's name in a file table: a folder that is changed later has another one."""
        return f"{root}#{self.digest}"


def list_images(root: str) -> ImageListing:
    """About 150 bytes an image. Raises DatasetError if there are no folders with images, or more than
    MOST_IMAGES."""
    with files.reading(root, "a folder of images"):
        found = [name for name in files.below(root) if name.lower().endswith(SUFFIXES) and "/" in name]
    if not found:
        msg = f"{root} has no folders with images ({' '.join(suffix[1:] for suffix in SUFFIXES)})"
        raise DatasetError(msg, hint="a class is a folder: root/cat/1.jpg, root/dog/2.jpg", url=root)
    if len(found) > MOST_IMAGES:
        msg = f"{root} has {len(found)} images; each trainer lists at most {MOST_IMAGES}"
        raise DatasetError(msg, hint="pack them into tar files: trireme.data.WebDataset", url=root)
    order = sorted(
        (hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), name)
        for name in found
    )
    whole = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for hashed, _ in order:
        whole.update(hashed)
    classes = sorted({name.partition("/")[0] for name in found})
    return ImageListing([name for _, name in order], classes, whole.hexdigest())


def root_of(file: str) -> tuple[str, str]:
    """(root, digest) of what `stamped` gave; digest "" of a root alone."""
    root, _, digest = file.rpartition("#")
    if root and len(digest) == 2 * _DIGEST_BYTES and set(digest) <= set("0123456789abcdef"):
        return root, digest
    return file, ""


WHOLE_BYTES, END_BYTES, BLOCK_BYTES = 256 << 10, 64 << 10, 4 << 10
BLOCKS, REMOTE_BLOCKS = 16, 2
LOOK_S = 60.0  # between two looks at a file of a storage that must be asked
KNOWN_FILES = 1 << 16


def stamp_of(url: str) -> str:
    """The stamp of a file; "" if there is no such file (a user's reader may be given anything). Raises what
    `files.reading` does."""
    with files.reading(url, "a file"):
        try:
            size, tag = files.size_and_tag(url)
            if tag:
                return f"{size} etag {tag}"
            with files.open_read(url) as source:
                return (
                    f"{size} content "
                    f"{_digest(source, size, BLOCKS if files.local_path(url) else REMOTE_BLOCKS)}"
                )
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return ""


def joined_stamps(stamps: list[str]) -> str:
    """One stamp of files that are read together; of one file its own."""
    if len(stamps) == 1:
        return stamps[0]
    return f"{len(stamps)} files {hashlib.blake2b(' | '.join(stamps).encode(), digest_size=16).hexdigest()}"


class CountedFiles:
    """Compares files of one dataset with their stamps. Its methods block, and may be called from several
    threads."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._known: OrderedDict[str, tuple[object, float]] = OrderedDict()
        self._lock = Lock()

    def difference(self, file: str, stamp: str) -> DatasetError | None:
        """What to tell if `file` is not the one with this stamp. A file that was looked at and has not
        changed since is not read again."""
        if not stamp or isinstance(self._dataset, ImageFolder):
            return None
        together = self._together(file)
        now, state = clock.monotonic(), tuple(map(_state, together))
        with self._lock:
            seen, at = self._known.get(file, (None, 0.0))
        if seen == (stamp, state) and (all(state) or now - at < LOOK_S):
            return None
        stamps = list(map(stamp_of, together))
        found = joined_stamps(stamps)
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
    msg = (
        f"{file} is not the file whose records were counted when the job began: it is {_said(found)}, "
        f"counted was {_said(counted)}"
    )
    hint = "put the counted file back and start the job again, or start a new job for the new file"
    return DatasetError(msg, hint=hint, url=file, counted=counted, found=found)


def _said(stamp: str) -> str:
    size, kind, digest = stamp.split(" ", 2)
    return (
        f"{size} {'files' if kind == 'files' else 'bytes'} with "
        f"{'ETag' if kind == 'etag' else 'digest'} {digest}"
    )


def _digest(source: BinaryIO, size: int, blocks: int) -> str:
    whole = hashlib.blake2b(digest_size=16)
    if size <= WHOLE_BYTES:
        whole.update(source.read())
        return whole.hexdigest()
    between = size - 2 * END_BYTES - BLOCK_BYTES
    places = [END_BYTES + between * number // max(blocks - 1, 1) for number in range(blocks)]
    for place, count in (
        (0, END_BYTES),
        *((place, BLOCK_BYTES) for place in places),
        (size - END_BYTES, END_BYTES),
    ):
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

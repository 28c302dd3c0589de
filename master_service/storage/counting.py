"""Counts a dataset's records once and keeps the answer in the job's storage: a new master does not count again.

    urls --expand--> files --count each (threads)--> FileTable --save--> {storage}/dataset-<digest>.json --load-->

    stopped before the end: file counted --every KEEP_S, and when stopped--> {storage}/counting-<digest>.json --next master--> taken if the file is unchanged

Of lines and framed records (RecordIO, TFRecord, tar files) the bytes at which tasks may start are kept: 8 bytes each. Everything here
blocks. Every error names the URL and what to do.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt

from master_service.core.queue.file_table import FileTable, TableFile, TaskSizes
from master_service.storage.heads import Heads
from trireme_shared.datasets import mapped_files, record_files
from trireme_shared.datasets.dataset_files import files_of, joined_stamps, list_images, stamp_of
from trireme_shared.datasets.line_scan import Lines, RecordScanner, chunks, data_start, refuse_archive
from trireme_shared.datasets.user_modules import count_object, load_custom
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.storage import files
from trireme_shared.platform.storage.compressed import scanning
from trireme_shared.protocol.errors import DatasetError, NotFound, StorageUnreachable, TriremeError, is_interrupt
from trireme_shared.protocol.records.datasets import (
    Bytes,
    Csv,
    Custom,
    Dataset,
    HuggingFace,
    ImageFolder,
    IterableStyle,
    MapStyle,
    Npy,
    Parquet,
    RecordIO,
    TFRecord,
    WebDataset,
)

THREADS = 8
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

Progress = Callable[[int, int], None]


Counter = Callable[[str], TableFile]


def count_records(
    dataset: Dataset,
    sizes: TaskSizes | int,
    progress: Progress | None = None,
    partial: PartialCounts | None = None,
    beside: Path | None = None,
    seed: int = 0,
) -> FileTable:
    """The file table of a dataset; `sizes`: how large its tasks are, or records of each. `progress(files counted, files)` is called in the calling thread. With `partial` it goes on
    where an earlier count was stopped, and can be stopped itself. `beside`: the folder of the job's script, where the module of a
    Custom dataset may lie. `seed`: of the job, for objects of the script.

    Raises DatasetError if no file matches, one cannot be read, or there is no record at all; CountingStopped.
    """
    if isinstance(sizes, int):
        sizes = TaskSizes(sizes, fixed=sizes)
    files = files_of(dataset)
    if isinstance(dataset, Npy):
        _check_names(dataset, files)
    check = partial.check if partial is not None else lambda: None
    heads = Heads(dataset)
    count = _stamped(dataset, _counter(dataset, sizes, check, beside, heads, seed))
    if partial is not None:
        partial.load()
    counted: list[TableFile] = []
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), thread_name_prefix="count") as pool:
        try:
            for file in pool.map(_kept(partial, count), files):
                counted.append(file)
                if partial is not None:
                    partial.keep()
                if progress is not None:
                    progress(len(counted), len(files))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    heads.check(counted)
    if isinstance(dataset, Npy) and dataset.aligned:
        counted = [_aligned(counted)]
    if not any(file.records for file in counted):
        shown = ", ".join(dataset.urls)
        msg = f"the dataset {shown} is empty: {len(files)} files with 0 records"
        raise DatasetError(msg, hint=_why_empty(dataset), urls=list(dataset.urls))
    table = sizes.table(counted)
    if not table.tasks:
        msg = f"drop_last leaves out all {table.left_out} records: no file has the {sizes.minibatch} of a minibatch"
        raise DatasetError(
            msg, hint="leave drop_last out, lower global_batch_size, or join the files", urls=list(dataset.urls)
        )
    return replace(table, digest=digest_of(table))


def digest_of(table: FileTable) -> str:
    """SHA-256 of the table's content, in hex."""
    return hashlib.sha256(_content(table)).hexdigest()


def save(table: FileTable, storage_url: str) -> str:
    """Write the table below `storage_url`, all or nothing; its URL. Raises DatasetError if that cannot be written."""
    url = _table_url(storage_url, table.digest)
    try:
        files.write_bytes(url, _content(table))
    except (OSError, TriremeError) as error:
        msg = f"the file table cannot be written to {url}: {error}"
        raise DatasetError(msg, hint="make the job's storage writable for the master", url=url) from error
    return url


def load(storage_url: str, digest: str) -> FileTable:
    """The table `save` wrote. Raises NotFound if it is missing, DatasetError if it is not the one that `digest` names: count again.
    StorageUnreachable: the storage does not say, or refuses access."""
    url = _table_url(storage_url, digest)
    hint = "every master needs the same storage; the dataset is counted again"
    try:
        content = files.read_bytes(url)
    except _MISSING as error:
        raise NotFound(f"the file table {url} does not exist (any more)", hint=hint, url=url) from error
    except OSError as error:
        msg = f"the file table {url} cannot be read now: {error}"
        raise StorageUnreachable(msg, hint="make the job's storage reachable; it is tried again", url=url) from error
    with files.reading(url, "a file table"):
        table = FileTable.from_map(json.loads(content), digest)
        found = digest_of(table)
        if found != digest:
            raise DatasetError(f"{url} has the digest {found[:12]}, not {digest[:12]}", hint=hint, url=url)
        return table


def _content(table: FileTable) -> bytes:
    return json.dumps(table.to_map(), separators=(",", ":"), sort_keys=True).encode()


def _table_url(storage_url: str, digest: str) -> str:
    return files.join(storage_url, f"dataset-{digest}.json")


def _stamped(dataset: Dataset, count: Counter) -> Counter:
    """Files get the stamp that they had before their records were counted: one that is replaced meanwhile differs from it."""
    if isinstance(dataset, MapStyle | IterableStyle | ImageFolder):
        return count

    def stamped(file: str) -> TableFile:
        stamp = stamp_of(file) if not isinstance(dataset, Custom) else _stamp_if_file(file)
        return replace(count(file), stamp=stamp)

    return stamped


def _stamp_if_file(url: str) -> str:
    """What a user's reader is given may be anything."""
    try:
        return stamp_of(url)
    except TriremeError:
        return ""


def _kept(partial: PartialCounts | None, count: Counter) -> Counter:
    return count if partial is None else lambda url: partial.counted(url, count)


def _counter(
    dataset: Dataset, sizes: TaskSizes, check: Callable[[], None], beside: Path | None, heads: Heads, seed: int
) -> Counter:
    """`check` is called often, and raises when counting shall stop."""
    match dataset:
        case Parquet():
            return lambda file: _count_or_empty(file, lambda file: _count_parquet(file, heads))
        case Bytes():
            return lambda file: _count_bytes(file, dataset)
        case Npy():
            return lambda file: _count_or_empty(file, lambda file: _count_npy(file, heads))
        case Custom():
            return _custom_counter(dataset, beside)
        case MapStyle() | IterableStyle():
            return lambda name: TableFile(name, count_object(dataset, beside, seed))
        case TFRecord() | RecordIO() | WebDataset():
            return lambda file: count_framed(file, dataset, sizes, check)
        case HuggingFace():
            return lambda file: _count_arrow(file, heads)
        case ImageFolder():
            return _count_images
        case Csv():
            return lambda file: _count_csv(file, dataset, sizes, check, heads)
        case _:
            return lambda file: _count_lines(file, dataset, sizes, check)


def _count_or_empty(file: str, count: Counter) -> TableFile:
    try:
        return count(file)
    except DatasetError:
        if not files.is_empty(file):
            raise
        return TableFile(file, 0)


def _count_parquet(file: str, heads: Heads) -> TableFile:
    import pyarrow.parquet as pq  # noqa: PLC0415  only where it is needed

    with files.reading(file, "Parquet"), files.open_read(file) as source:
        footer = pq.read_metadata(source)
        heads.arrow(file, footer.schema.to_arrow_schema())
        return TableFile(file, int(footer.num_rows))


def _count_arrow(file: str, heads: Heads) -> TableFile:
    from trireme_shared.datasets.mapped_files import read_arrow  # noqa: PLC0415  pyarrow only where it is needed

    table = read_arrow(file)
    heads.arrow(file, table.schema)
    return TableFile(file, int(table.num_rows))


def _count_csv(file: str, dataset: Csv, sizes: TaskSizes, check: Callable[[], None], heads: Heads) -> TableFile:
    counted = _count_lines(file, dataset, sizes, check)
    if counted.records:
        heads.rows(file)
    return counted


def _count_images(root: str) -> TableFile:
    listing = list_images(root)
    return TableFile(listing.stamped(root), len(listing.names))


def _count_bytes(file: str, dataset: Bytes) -> TableFile:
    with files.reading(file, "bytes"):
        return TableFile(file, max(0, (files.size(file) - dataset.overlap) // dataset.record_bytes))


def _count_lines(file: str, dataset: Lines, sizes: TaskSizes, check: Callable[[], None]) -> TableFile:
    refuse_archive(file)
    kept = TaskStarts(sizes)
    with files.reading(file, dataset.kind), scanning(file) as source:
        scanner = RecordScanner(dataset, file, data_start(source))
        header = isinstance(dataset, Csv) and dataset.column_names is None
        for chunk in chunks(source):
            check()
            starts, _ = scanner.feed(chunk)
            if header and len(starts):
                starts, header = starts[1:], False
            kept.take(starts)
        last = scanner.finish()
        if last is not None and not header:
            kept.take(np.array([last[0]], dtype=np.int64))
    return kept.counted(file)


def _check_names(dataset: Npy, files: list[str]) -> None:
    """Rows of all files must get the same column name, unless the files are aligned."""
    for file in files:
        stem, first = PurePosixPath(file).stem, PurePosixPath(files[0]).stem
        if not dataset.aligned and dataset.columns is None and stem != first:
            msg = f"the rows of {file} would be called {stem!r}, those of {files[0]} {first!r}"
            raise DatasetError(
                msg, hint='name them: Npy(…, columns=("x",)), or join the files with aligned=True', url=file
            )
    names = len(dataset.columns or ())
    if dataset.columns is not None and names != (len(files) if dataset.aligned else 1):
        msg = f"columns names {names} arrays, but there are {len(files)} files{' aligned' if dataset.aligned else ''}"
        raise DatasetError(msg, hint="give one name, or with aligned=True one for each file", urls=list(dataset.urls))


def _count_npy(file: str, heads: Heads) -> TableFile:
    with files.reading(file, ".npy"), files.open_read(file) as source:
        shape, _, dtype = mapped_files.read_npy_head(source)
        if not shape or dtype.hasobject:
            what = "a single number" if not shape else "Python objects"
            raise DatasetError(f"{file} holds {what}, not rows of numbers", hint="save an array of numbers", url=file)
    heads.array(file, shape, dtype)
    return TableFile(file, int(shape[0]))


def _aligned(files: list[TableFile]) -> TableFile:
    for file in files:
        if file.records != files[0].records:
            msg = f"{file.path} has {file.records} rows, {files[0].path} has {files[0].records}, but aligned=True"
            raise DatasetError(msg, hint="aligned files have the same number of rows", url=file.path)
    return replace(files[0], stamp=joined_stamps([file.stamp for file in files]))


def _custom_counter(dataset: Custom, beside: Path | None) -> Counter:
    reader = load_custom(dataset.reader, beside)

    def count(url: str) -> TableFile:
        try:
            records = int(reader.count(url))
        except BaseException as error:  # the user's code may raise anything
            if is_interrupt(error):
                raise
            msg = f"{dataset.reader}.count({url!r}) failed: {type(error).__name__}: {error}"
            raise DatasetError(msg, hint="fix the reader", url=url) from error
        if records < 0:
            raise DatasetError(f"{dataset.reader}.count({url!r}) gave {records}", hint="a count is 0 or more", url=url)
        return TableFile(url, records)

    return count


def _why_empty(dataset: Dataset) -> str:
    match dataset:
        case Bytes():
            return f"a record takes {dataset.record_bytes} + {dataset.overlap} bytes: give longer files or a smaller record_bytes"
        case Csv(column_names=None):
            return "the first line of a CSV file is its header; without one, give column_names"
        case _:
            return "point dataset() at files with records"


KEEP_S = 5.0

log = telemetry.logger("partial_counts")


class CountingStopped(Exception):
    """The master that counted was asked to stop, or leads no more."""


class PartialCounts:
    """Counts of a dataset that was not counted to its end: the next master goes on where the last one was stopped.

    Of one dataset whose tasks are cut in one way. Its methods block; several threads may count at once. What cannot be kept or read is
    counted again.
    """

    def __init__(self, storage_url: str, dataset: Dataset, sizes: TaskSizes | int) -> None:
        self.stop = threading.Event()
        named = f"{sizes!r} {dataset.model_dump_json()}".encode()
        self._url = files.join(storage_url, f"counting-{hashlib.sha256(named).hexdigest()[:32]}.json")
        self._counted: dict[str, tuple[str, TableFile]] = {}
        self._lock = threading.Lock()
        self._kept_at = 0.0
        self._kept = 0

    def load(self) -> None:
        """What an earlier master has kept. In the thread that counts."""
        self._kept_at = clock.monotonic()
        try:
            stored = json.loads(files.read_bytes(self._url))
            for file in map(TableFile.from_map, stored["files"]):
                self._counted[file.path] = str(stored["stamps"][file.path]), file
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, TriremeError) as error:
            log.warning("counts_unreadable", url=self._url, cause=str(error))
            return
        self._kept = len(self._counted)
        log.info("counting_goes_on", files=self._kept)

    def counted(self, url: str, count: Counter) -> TableFile:
        """The count of a file, as kept if the file is unchanged. Raises CountingStopped, and what `count` raises."""
        self.check()
        stamp = files.stamp(url)
        known, file = self._counted.get(url, ("", None))
        if stamp and file is not None and known == stamp:
            return file
        file = count(url)
        if stamp:
            with self._lock:
                self._counted[url] = stamp, file
        return file

    def check(self) -> None:
        """Raises CountingStopped."""
        if self.stop.is_set():
            raise CountingStopped

    def keep(self, *, now: bool = False) -> None:
        """Write what is counted, every KEEP_S or `now`."""
        with self._lock:
            counted = dict(self._counted)
        if len(counted) <= self._kept or (not now and clock.monotonic() - self._kept_at < KEEP_S):
            return
        stored = {
            "stamps": {url: stamp for url, (stamp, _) in counted.items()},
            "files": [file.to_map() for _, file in counted.values()],
        }
        try:
            files.write_bytes(self._url, json.dumps(stored, separators=(",", ":")).encode())
        except (OSError, TriremeError) as error:
            log.warning("counts_not_kept", url=self._url, cause=str(error))
        self._kept, self._kept_at = len(counted), clock.monotonic()

    def remove(self) -> None:
        """The whole dataset is counted."""
        if self._kept:
            try:
                files.remove_file(self._url)
            except (OSError, TriremeError) as error:
                log.warning("counts_not_removed", url=self._url, cause=str(error))


CHECK_EVERY = 1024


class TaskStarts:
    """Every so many records one byte (`kept`), as TaskSizes says; of a long file fewer."""

    def __init__(self, sizes: TaskSizes) -> None:
        self.records = 0
        self._sizes, self._stride = sizes, sizes.stride(0)
        self.kept = array("q")

    def take(self, starts: npt.NDArray[np.int64]) -> None:
        """In place: the bytes of the next records."""
        self.kept.frombytes(starts[-self.records % self._stride :: self._stride].tobytes())
        self.records += len(starts)
        if (stride := self._sizes.stride(self.records)) > self._stride:
            self.kept, self._stride = self.kept[:: stride // self._stride], stride

    def counted(self, file: str) -> TableFile:
        """The file, all of whose records were taken."""
        return TableFile(file, self.records, tuple(self.kept))


def count_framed(
    file: str, dataset: TFRecord | RecordIO | WebDataset, sizes: TaskSizes, check: Callable[[], None]
) -> TableFile:
    """`check` is called often, and raises when counting shall stop. Raises DatasetError with the byte of what is damaged."""
    with files.reading(file, dataset.kind), scanning(file) as source:
        if isinstance(dataset, RecordIO):  # readers find chunks by their heads
            records = 0
            for chunk in record_files.record_io_chunks(source, file):
                check()
                records += chunk.records
            return TableFile(file, records)
        if isinstance(dataset, TFRecord):
            return _counted(file, record_files.tf_record_starts(source, file), sizes, check)
        starts = (record.start for record in record_files.tar_records(source, file))
        return _counted(file, starts, sizes, check)


def _counted(file: str, starts: Iterator[int], sizes: TaskSizes, check: Callable[[], None]) -> TableFile:
    kept = TaskStarts(sizes)
    while len(some := np.fromiter(islice(starts, CHECK_EVERY), np.int64)):
        check()
        kept.take(some)
    return kept.counted(file)

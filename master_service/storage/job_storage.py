"""What the master reads and writes in the job's storage: file tables, checkpoints' manifests, metrics by
step.

Records are counted once, and the answer is kept: a new master does not count again.

    urls --expand--> files --count each (threads; counting.py)--> FileTable --save-->
        {storage}/dataset-<digest>.json --load-->

    stopped before the end: file counted --every KEEP_S, and when stopped--> {storage}/counting-<digest>.json
        --next master--> taken if the file is unchanged
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from master_service.core.queue.file_table import FileTable, TableFile, TaskSizes
from master_service.storage.counting import (
    Counter,
    Heads,
    Progress,
    aligned,
    check_names,
    counter_of,
    why_empty,
)
from master_service.storage.series_files import SeriesFiles, StoredSeries
from master_service.storage.user_code import CountRequest, count_apart
from trireme_shared.checkpoints import stored
from trireme_shared.datasets.dataset_files import files_of, stamp_of
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.runtime.limits import cores
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import (
    DatasetError,
    InvalidArgument,
    NotFound,
    StorageUnreachable,
    TriremeError,
)
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.checkpoints import CheckpointRef, Manifest
from trireme_shared.protocol.records.datasets import (
    Custom,
    Dataset,
    ImageFolder,
    IterableStyle,
    MapStyle,
    Npy,
)

log = telemetry.logger("job_storage")
THREADS = 8
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
KEEP_S = 5.0


class JobStorage(Protocol):
    """The port to datasets and storage; the simulation has one without threads and files. `series`: None:
    metrics are not kept."""

    series: SeriesFiles | None

    async def count(self, source: Dataset, sizes: TaskSizes | int) -> FileTable:
        """Count the records, save the table and return it. Raises DatasetError."""
        ...

    async def load_table(self, digest: str) -> FileTable:
        """The table that `count` saved. Raises NotFound if it is not there any more, DatasetError if it is
        damaged; StorageUnreachable if the storage does not say: it may be there."""
        ...

    async def script_folder(self) -> Path:
        """Where the job's script and the modules beside it lie on this host. Raises TriremeError."""
        ...

    async def read_manifest(self, ref: CheckpointRef) -> Manifest:
        """Raises CheckpointUnusable; OSError when the storage itself fails."""
        ...

    async def verify(self, ref: CheckpointRef) -> None:
        """Read all parts of the checkpoint, too. Raises as `read_manifest`."""
        ...


async def _as_it_is(script: str) -> Path:
    return Path(script)


async def remove_files(spec: JobSpec) -> None:
    """All files of a job that has ended: checkpoints, exports, tables. Raises StorageUnreachable; call it
    again then."""
    try:
        await asyncio.to_thread(files.remove_tree, spec.storage)
    except (OSError, InvalidArgument) as error:
        msg = f"the files of job {spec.job} in {spec.storage} cannot be deleted: {error}"
        raise StorageUnreachable(msg, hint="the job is still there; delete it again") from error


class FileStorage:
    """Below the spec's `storage` (an fsspec URL). Reading files blocks, so it happens in threads.
    `find_script`: where the job's script lies on this host; asked for datasets that name a module of it
    (shared/trireme_shared/platform/membership/local_script.py)."""

    def __init__(self, spec: JobSpec, find_script: Callable[[str], Awaitable[Path]] = _as_it_is) -> None:
        self._storage, self._job, self._script, self._seed = spec.storage, spec.job, spec.script, spec.seed
        self._code_limit_s = spec.task_timeout_ceiling_s
        self._find_script = find_script
        self.series: SeriesFiles | None = StoredSeries(spec.storage)

    async def count(self, source: Dataset, sizes: TaskSizes | int) -> FileTable:
        if runs_code(source):
            table = await self._count_by_code(source, sizes)
            await asyncio.to_thread(save, table, self._storage)
        else:
            partial = PartialCounts(self._storage, source, sizes)
            try:
                table = await asyncio.to_thread(self._counted, source, sizes, partial)
            finally:  # a cancelled caller: the thread ends at the next chunk, and keeps what it has
                partial.stop.set()
        log.info("dataset_counted", table=repr(table))
        return table

    async def _count_by_code(self, source: Dataset, sizes: TaskSizes | int) -> FileTable:
        """By the user's own code, in a process of its own. Raises DatasetError."""
        try:
            script = await self._find_script(self._script)
        except InvalidArgument as error:
            raise DatasetError(error.message, hint=error.hint) from error
        sizes = sizes_of(sizes)
        request = CountRequest(
            dataset=source,
            storage=self._storage,
            folder=str(script.parent),
            seed=self._seed,
            minibatch=sizes.minibatch,
            streams=sizes.streams,
            fixed=sizes.fixed,
            drop_last=sizes.drop_last,
        )
        return await count_apart(request, self._code_limit_s)

    def _counted(self, source: Dataset, sizes: TaskSizes | int, partial: PartialCounts) -> FileTable:
        """Blocks. Raises DatasetError, CountingStopped."""
        try:
            table = count_records(source, sizes, None, partial, self._seed)
        except CountingStopped:
            partial.keep(now=True)
            raise
        save(table, self._storage)
        partial.remove()
        return table

    async def load_table(self, digest: str) -> FileTable:
        return await asyncio.to_thread(load, self._storage, digest)

    async def script_folder(self) -> Path:
        return (await self._find_script(self._script)).parent

    async def read_manifest(self, ref: CheckpointRef) -> Manifest:
        return await asyncio.to_thread(stored.read_manifest, self._storage, self._job, ref)

    async def verify(self, ref: CheckpointRef) -> None:
        manifest = await self.read_manifest(ref)
        await asyncio.to_thread(stored.verify_parts, self._storage, ref, manifest)


def runs_code(dataset: Dataset) -> bool:
    """Whether the user's own code counts its records."""
    if isinstance(dataset, IterableStyle):
        return dataset.stated is None
    stated = isinstance(dataset, MapStyle) and dataset.records is not None
    return dataset.names_code and not stated


def sizes_of(sizes: TaskSizes | int) -> TaskSizes:
    """An int: so many records in each task."""
    return TaskSizes(sizes, fixed=sizes) if isinstance(sizes, int) else sizes


def count_records(
    dataset: Dataset,
    sizes: TaskSizes | int,
    progress: Progress | None = None,
    partial: PartialCounts | None = None,
    seed: int = 0,
) -> FileTable:
    """The file table of a dataset; `sizes`: how large its tasks are, or records of each. `progress(files
    counted, files)` is called in the calling thread. With `partial` it goes on where an earlier count was
    stopped, and can be stopped itself. `seed`: of the job, for objects of the script.

    Raises DatasetError if no file matches, one cannot be read, or there is no record at all; CountingStopped.
    """
    sizes = sizes_of(sizes)
    files = files_of(dataset)
    if isinstance(dataset, Npy):
        check_names(dataset, files)
    check = partial.check if partial is not None else lambda: None
    heads = Heads(dataset)
    count = _stamped(dataset, counter_of(dataset, sizes, check, heads, seed))
    if partial is not None:
        partial.load()
    counted: list[TableFile] = []
    with ThreadPoolExecutor(min(THREADS, cores()), thread_name_prefix="count") as pool:
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
        counted = [aligned(counted)]
    if not any(file.records for file in counted):
        shown = ", ".join(dataset.urls)
        msg = f"the dataset {shown} is empty: {len(files)} files with 0 records"
        raise DatasetError(msg, hint=why_empty(dataset), urls=list(dataset.urls))
    table = replace(sizes.table(counted), in_sequence=isinstance(dataset, IterableStyle))
    if not table.tasks:
        msg = (
            f"drop_last leaves out all {table.left_out} records: no file has the {sizes.minibatch} of "
            "a minibatch"
        )
        raise DatasetError(
            msg,
            hint="leave drop_last out, lower global_batch_size, or join the files",
            urls=list(dataset.urls),
        )
    return replace(table, digest=digest_of(table))


def digest_of(table: FileTable) -> str:
    """SHA-256 of the table's content, in hex."""
    return hashlib.sha256(_content(table)).hexdigest()


def save(table: FileTable, storage_url: str) -> str:
    """Write the table below `storage_url`, all or nothing; its URL. Raises DatasetError if that cannot be
    written."""
    url = _table_url(storage_url, table.digest)
    try:
        files.write_bytes(url, _content(table))
    except (OSError, TriremeError) as error:
        msg = f"the file table cannot be written to {url}: {error}"
        raise DatasetError(msg, hint="make the job's storage writable for the master", url=url) from error
    return url


def load(storage_url: str, digest: str) -> FileTable:
    """The table `save` wrote. Raises NotFound if it is missing, DatasetError if it is not the one that
    `digest` names: count again. StorageUnreachable: the storage does not say, or refuses access."""
    url = _table_url(storage_url, digest)
    hint = "every master needs the same storage; the dataset is counted again"
    try:
        content = files.read_bytes(url)
    except _MISSING as error:
        raise NotFound(f"the file table {url} does not exist (any more)", hint=hint, url=url) from error
    except OSError as error:
        msg = f"the file table {url} cannot be read now: {error}"
        raise StorageUnreachable(
            msg, hint="make the job's storage reachable; it is tried again", url=url
        ) from error
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
    """Files get the stamp that they had before their records were counted: one that is replaced meanwhile
    differs from it."""
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


class CountingStopped(Exception):
    """The master that counted was asked to stop, or leads no more."""


class PartialCounts:
    """Counts of a dataset that was not counted to its end: the next master goes on where the last one was
    stopped.

    Of one dataset whose tasks are cut in one way. Its methods block; several threads may count at once. What
    cannot be kept or read is counted again.
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
        """The count of a file, as kept if the file is unchanged. Raises CountingStopped, and what `count`
        raises."""
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

"""What the master reads and writes in the job's storage: file tables (counted once) and checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from master_service.core.queue.file_table import FileTable, TaskSizes
from master_service.storage import counting
from master_service.storage.counting import CountingStopped, PartialCounts
from master_service.storage.series_files import SeriesFiles, StoredSeries
from trireme_shared.checkpoints import stored
from trireme_shared.datasets.user_modules import find_beside
from trireme_shared.platform.runtime import telemetry
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import DatasetError, InvalidArgument, StorageUnreachable
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.checkpoints import CheckpointRef, Manifest
from trireme_shared.protocol.records.datasets import Dataset

log = telemetry.logger("job_storage")


class JobStorage(Protocol):
    """The port to datasets and storage; the simulation has one without threads and files. `series`: None: metrics are not kept."""

    series: SeriesFiles | None

    async def count(self, source: Dataset, sizes: TaskSizes | int) -> FileTable:
        """Count the records, save the table and return it. Raises DatasetError."""
        ...

    async def load_table(self, digest: str) -> FileTable:
        """The table that `count` saved. Raises NotFound if it is not there any more, DatasetError if it is damaged;
        StorageUnreachable if the storage does not say: it may be there."""
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
    """All files of a job that has ended: checkpoints, exports, tables. Raises StorageUnreachable; call it again then."""
    try:
        await asyncio.to_thread(files.remove_tree, spec.storage)
    except OSError as error:
        msg = f"the files of job {spec.job} in {spec.storage} cannot be deleted: {error}"
        raise StorageUnreachable(msg, hint="the job is still there; delete it again") from error


class FileStorage:
    """Below the spec's `storage` (an fsspec URL). Reading files blocks, so it happens in threads. `find_script`: where the job's
    script lies on this host; asked for datasets that name a module of it (shared/trireme_shared/platform/membership/local_script.py)."""

    def __init__(self, spec: JobSpec, find_script: Callable[[str], Awaitable[Path]] = _as_it_is) -> None:
        self._storage, self._job, self._script, self._seed = spec.storage, spec.job, spec.script, spec.seed
        self._find_script = find_script
        self.series: SeriesFiles | None = StoredSeries(spec.storage)

    async def count(self, source: Dataset, sizes: TaskSizes | int) -> FileTable:
        beside = None
        if source.names_code:
            try:
                script = await self._find_script(self._script)
            except InvalidArgument as error:
                raise DatasetError(error.message, hint=error.hint) from error
            find_beside(str(script))
            beside = script.parent
        partial = PartialCounts(self._storage, source, sizes)
        try:
            table = await asyncio.to_thread(self._counted, source, sizes, partial, beside)
        finally:
            partial.stop.set()  # a cancelled caller: the thread ends at the next chunk, and keeps what it has
        log.info("dataset_counted", table=repr(table))
        return table

    def _counted(
        self, source: Dataset, sizes: TaskSizes | int, partial: PartialCounts, beside: Path | None
    ) -> FileTable:
        """Blocks. Raises DatasetError, CountingStopped."""
        try:
            table = counting.count_records(source, sizes, None, partial, beside, self._seed)
        except CountingStopped:
            partial.keep(now=True)
            raise
        counting.save(table, self._storage)
        partial.remove()
        return table

    async def load_table(self, digest: str) -> FileTable:
        return await asyncio.to_thread(counting.load, self._storage, digest)

    async def script_folder(self) -> Path:
        return (await self._find_script(self._script)).parent

    async def read_manifest(self, ref: CheckpointRef) -> Manifest:
        return await asyncio.to_thread(stored.read_manifest, self._storage, self._job, ref)

    async def verify(self, ref: CheckpointRef) -> None:
        manifest = await self.read_manifest(ref)
        await asyncio.to_thread(stored.verify_parts, self._storage, ref, manifest)

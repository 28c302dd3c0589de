"""What the master reads and writes in the job's storage: file tables (counted once) and checkpoints."""

from __future__ import annotations

import asyncio
from typing import Protocol

from master_service.core.queue.file_table import FileTable
from master_service.storage import counting
from master_service.storage.partial_counts import CountingStopped, PartialCounts
from shared.checkpoints import stored
from shared.datasets.custom_reader import find_beside
from shared.records import JobSpec
from shared.records.checkpoints import CheckpointRef, Manifest
from shared.records.datasets import Custom, Dataset
from shared.runtime import telemetry

log = telemetry.logger("job_storage")


class JobStorage(Protocol):
    """The port to datasets and storage; the simulation has one without threads and files."""

    async def count(self, source: Dataset, task_records: int) -> FileTable:
        """Count the records, save the table and return it. Raises DatasetError."""
        ...

    async def load_table(self, digest: str) -> FileTable:
        """The table that `count` saved. Raises NotFound if it is not there any more, DatasetError if it is damaged;
        StorageUnreachable if the storage does not say: it may be there."""
        ...

    async def read_manifest(self, ref: CheckpointRef) -> Manifest:
        """Raises CheckpointUnusable; OSError when the storage itself fails."""
        ...

    async def verify(self, ref: CheckpointRef) -> None:
        """Read all parts of the checkpoint, too. Raises as `read_manifest`."""
        ...


class FileStorage:
    """Below the spec's `storage` (an fsspec URL). Reading files blocks, so it happens in threads."""

    def __init__(self, spec: JobSpec) -> None:
        self._storage, self._job, self._script = spec.storage, spec.job, spec.script

    async def count(self, source: Dataset, task_records: int) -> FileTable:
        if isinstance(source, Custom):
            find_beside(self._script)
        partial = PartialCounts(self._storage, source, task_records)
        try:
            table = await asyncio.to_thread(self._counted, source, task_records, partial)
        finally:
            partial.stop.set()  # a cancelled caller: the thread ends at the next chunk, and keeps what it has
        log.info("dataset_counted", table=repr(table))
        return table

    def _counted(self, source: Dataset, task_records: int, partial: PartialCounts) -> FileTable:
        """Blocks. Raises DatasetError, CountingStopped."""
        try:
            table = counting.count_records(source, task_records, None, partial)
        except CountingStopped:
            partial.keep(now=True)
            raise
        counting.save(table, self._storage)
        partial.remove()
        return table

    async def load_table(self, digest: str) -> FileTable:
        return await asyncio.to_thread(counting.load, self._storage, digest)

    async def read_manifest(self, ref: CheckpointRef) -> Manifest:
        return await asyncio.to_thread(stored.read_manifest, self._storage, self._job, ref)

    async def verify(self, ref: CheckpointRef) -> None:
        manifest = await self.read_manifest(ref)
        await asyncio.to_thread(stored.verify_parts, self._storage, ref, manifest)

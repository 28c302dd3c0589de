"""The file tables of a job: counted once, kept in the job's storage, loaded by each later master."""

from __future__ import annotations

import asyncio
from typing import Protocol

from master_service.core.queue.file_table import FileTable
from master_service.datasets import counting
from shared.records.datasets import Dataset
from shared.runtime import telemetry

log = telemetry.logger("tables")


class Tables(Protocol):
    """The port to datasets and storage; a simulation gives tables from memory."""

    async def count(self, source: Dataset, task_records: int) -> FileTable:
        """Count, keep and return. Raises DatasetError."""
        ...

    async def load(self, digest: str) -> FileTable:
        """What `count` kept. Raises NotFound if it is not there any more."""
        ...


class StoredTables:
    """In `storage` (an fsspec URL). Reading files blocks, so it happens in threads."""

    def __init__(self, storage: str) -> None:
        self._storage = storage

    async def count(self, source: Dataset, task_records: int) -> FileTable:
        table = await asyncio.to_thread(counting.count_records, source, task_records)
        await asyncio.to_thread(counting.save, table, self._storage)
        log.info("dataset_counted", table=repr(table))
        return table

    async def load(self, digest: str) -> FileTable:
        return await asyncio.to_thread(counting.load, self._storage, digest)

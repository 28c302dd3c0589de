"""What masters read from the storage, without threads and files."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from master_service.core.queue.file_table import FileTable, TaskSizes
from tests.simulation.dataset import files_of
from tests.simulation.job_spec import EVALUATION, TRAINING
from tests.simulation.plans import Plan
from trireme_shared.checkpoints import stored
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.checkpoints import CheckpointRef, Manifest
from trireme_shared.protocol.records.datasets import Dataset


class MemorySeries:
    """master_service.storage.series_files.SeriesFiles: outlives masters. A file is there as a whole, or not
    at all."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}

    async def names(self) -> list[str]:
        await asyncio.sleep(0.005)
        return sorted(self.contents)

    async def read(self, name: str) -> bytes:
        await asyncio.sleep(0.005)
        if name not in self.contents:
            raise FileNotFoundError(name)
        return self.contents[name]

    async def write(self, name: str, content: bytes) -> None:
        await asyncio.sleep(0.05)
        self.contents[name] = content
        await asyncio.sleep(0.05)

    async def remove(self, names: Iterable[str]) -> None:
        for name in names:
            await asyncio.sleep(0.005)
            self.contents.pop(name, None)


class MemoryStorage:
    """master_service.storage.job_storage.JobStorage; tables are counted at once."""

    def __init__(self, plan: Plan, series: MemorySeries, spec: JobSpec) -> None:
        self._plan, self.series, self._spec = plan, series, spec

    async def script_folder(self) -> Path:
        return Path(self._spec.script).parent

    async def read_manifest(self, ref: CheckpointRef) -> Manifest:
        await asyncio.sleep(0.005)
        return stored.read_manifest(self._spec.storage, self._spec.job, ref)

    async def verify(self, ref: CheckpointRef) -> None:
        manifest = await self.read_manifest(ref)
        stored.verify_parts(self._spec.storage, ref, manifest)

    async def count(self, source: Dataset, sizes: TaskSizes) -> FileTable:
        await asyncio.sleep(0.05)
        files = files_of(source.urls[0], self._plan.job)
        table = sizes.table(files)
        digest = hashlib.sha256(repr(table.to_map()).encode()).hexdigest()
        return replace(table, digest=digest)

    async def load_table(self, digest: str) -> FileTable:
        for source in (TRAINING, EVALUATION):
            table = await self.count(source, TaskSizes.of(self._spec))
            if table.digest == digest:
                return table
        raise AssertionError(f"no table {digest}")

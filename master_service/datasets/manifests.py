"""Checkpoints' files, read by the master: the manifest to know where the lanes' readers stood, all to know them good."""

from __future__ import annotations

import asyncio
from typing import Protocol

from shared.checkpoints import stored
from shared.records.checkpoints import CheckpointRef, Manifest


class Manifests(Protocol):
    """The port to the job's storage; a simulation reads without threads."""

    async def read(self, ref: CheckpointRef) -> Manifest:
        """Raises CheckpointUnusable; OSError: the storage has trouble."""
        ...

    async def verify(self, ref: CheckpointRef) -> None:
        """Read all its parts, too. Raises as `read`."""
        ...


class StoredManifests:
    """In `storage` (an fsspec URL)."""

    def __init__(self, storage: str, job: str) -> None:
        self._storage, self._job = storage, job

    async def read(self, ref: CheckpointRef) -> Manifest:
        return await asyncio.to_thread(stored.read_manifest, self._storage, self._job, ref)

    async def verify(self, ref: CheckpointRef) -> None:
        manifest = await self.read(ref)
        await asyncio.to_thread(stored.verify_parts, self._storage, ref, manifest)

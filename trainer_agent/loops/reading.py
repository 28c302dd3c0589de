"""A checkpoint's values, read from its files while the job goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from trireme_shared.checkpoints import stored
from trireme_shared.platform.runtime import ids, telemetry
from trireme_shared.protocol.errors import PeerError
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.checkpoints import CheckpointRef, Manifest

STORAGE_TRIES = 4
PAUSE_S = 0.5

T = TypeVar("T")
log = telemetry.logger("evaluating")


async def read_again(read: Callable[[], Awaitable[T]], ref: CheckpointRef) -> T:
    """What `read` gives, which reads that checkpoint: tried STORAGE_TRIES times if the storage does not answer. Raises what the last try raises."""
    attempt = 0
    while True:
        try:
            return await read()
        except (OSError, PeerError) as error:
            log.warning("checkpoint_unread", checkpoint=ref.uuid, step=ref.step, cause=str(error))
            attempt += 1
            if attempt == STORAGE_TRIES:
                raise
            await asyncio.sleep(ids.jitter(PAUSE_S * 2 ** (attempt - 1)))


def read_checkpoint(spec: JobSpec, ref: CheckpointRef, memory: Callable[[int], memoryview]) -> Manifest:
    """The values of all blocks. Blocks. Raises CheckpointUnusable, OSError."""
    manifest = stored.read_manifest(spec.storage, spec.job, ref)
    stored.read_values(spec.storage, ref, manifest, memory)
    return manifest

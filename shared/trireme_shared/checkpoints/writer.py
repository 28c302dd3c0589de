"""Writes and deletes the files of checkpoints. Everything here blocks, so it runs in the threads of
Background: parts are written in the background of training, other work is urgent.

Snapshot -> pserver-<i>.<token>.safetensors        Manifest -> manifest-<md5>.json
narrow_to_changes, write_part -> one thread of the lowest priority, with rests
load, write_manifest, remove -> the other threads
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from trireme_shared.blocks.snapshot import Snapshot
from trireme_shared.checkpoints import stored, tables
from trireme_shared.checkpoints.tables import tables_of
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.storage import files, tensor_file
from trireme_shared.platform.storage.tensor_file import Entry, Made, Summary
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.checkpoints import Manifest, PartLink
from trireme_shared.protocol.records.layout import Layout


def write_part(
    url: str,
    metadata: Callable[[], Mapping[str, str]],
    snapshot: Snapshot,
    finite: Collection[str] = (),
    checksum: str = tensor_file.DEFAULT_CHECKSUM,
    *,
    rest: Callable[[], None] = lambda: None,
) -> Summary:
    """All tensors of a snapshot; `metadata` may be slow to make; `rest` is called between chunks; `checksum`:
    its name. Raises OSError; InvalidArgument if a tensor named in `finite` is not: such a checkpoint must not
    take the place of a good one."""
    tensors: list[tuple[Entry, memoryview | Made]] = []
    for name in finite:
        if name in snapshot.tensors:
            _check_finite(name, snapshot.tensors[name].buffer.tensor)
            rest()
    for name, saved in snapshot.tensors.items():
        dtype = str(saved.buffer.tensor.dtype).removeprefix("torch.")
        tensors.append((Entry(name, dtype, saved.shape), saved.buffer.view))
    return tensor_file.write(
        url,
        {**metadata(), **tables.metadata_of(snapshot)},
        [*tensors, *tables.tensors_of(snapshot, finite=bool(finite))],
        rest,
        checksum,
    )


def parameters_of(layout: Layout) -> list[str]:
    """Names of the tensors of parameters in the snapshots of that layout."""
    return [
        f"block.{block.number}" for block in layout.blocks() if layout.segments[block.segment].kind == "param"
    ]


def _check_finite(name: str, values: torch.Tensor) -> None:
    bad = 0 if math.isfinite(values.sum().item()) else int((~values.isfinite()).sum())
    if bad:
        msg = f"{bad} of {values.numel()} parameters in {name} are NaN or infinite"
        hint = (
            "go back to the checkpoint before, with a lower learning rate; on_nonfinite = ignore saves "
            "such parameters"
        )
        raise InvalidArgument(msg, hint=hint)


def part_metadata(
    job: str, uuid: str, version: int, timeline: int, index: int, digest: str
) -> dict[str, str]:
    """The metadata of a part, for people and other programs. `digest`: of the job's layout."""
    return {
        "format": "pt",
        "job": job,
        "uuid": uuid,
        "step": str(version),
        "timeline": str(timeline),
        "pserver": str(index),
        "digest": digest,
    }


def write_manifest(storage_url: str, manifest: Manifest) -> str:
    """Returns the name of the file. Raises OSError."""
    content = manifest.to_bytes()
    name = stored.manifest_name(content)
    files.write_bytes(files.join(stored.folder(storage_url, manifest.uuid), name), content)
    return name


def remove(storage_url: str, uuids: Iterable[str]) -> None:
    """Delete the files of these checkpoints. Raises OSError."""
    for uuid in uuids:
        files.remove_tree(stored.folder(storage_url, uuid))


MOST_SHARE = (
    # of the bytes of the whole part that the chain begins with: a larger delta is not worth its place in the
    # chain
    0.5
)


@dataclass(frozen=True, slots=True)
class DeltaBase:
    """What a delta builds on: a part that holds the rows that changed since an earlier part of the same
    owner, instead of all rows. `chain`: the whole part first. `versions`: of each table in the last part of
    it.

    own part in the latest checkpoint --chain--> DeltaBase
        --narrow_to_changes(snapshot)--> True: a delta is written; False: a whole part

    Parameters are in every part as a whole, so a part of which they are the larger half is always whole.
    """

    chain: tuple[PartLink, ...]
    versions: Mapping[str, int]


def narrow_to_changes(snapshot: Snapshot, base: DeltaBase) -> bool:
    """Leave to the tables of a snapshot what changed since `base`; False: the snapshot stays as it is, since
    that would be too much, or is not known. Blocks: 50 ms a million rows."""
    size = sum(saved.buffer.view.nbytes for saved in snapshot.tensors.values())
    found = []
    for table in tables_of(snapshot):
        changes = table.changes_since(base.versions[table.spec.name])
        if changes is None:
            return False
        size += changes.bytes
        found.append((table, changes))
    if not found or size > MOST_SHARE * base.chain[0].bytes:
        return False
    for table, changes in found:
        table.narrow(changes)
    return True


Offload = Callable[..., Awaitable[Any]]
"""`await offload(function, *arguments)`: run it where blocking does no harm."""

THREADS = 2  # a commit, a checkpoint being loaded
# the lowest priority: what training leaves, and a seventieth of a core if training wants all of it
NICENESS = 19
REST = 0.5  # of the working time: spreads the memory bandwidth that writing takes over more steps
WORK_S = 1e-3  # at least between two rests


class Abandoned(OSError):
    """The process ends: the file that was being written does not appear."""


class Pace:
    """The rests of the writing thread between two chunks. `hurried()`: the part is urgent, so there are no
    rests.

    Rests follow the thread's processor time. Time that it waits for a disk or a network costs training
    nothing.
    """

    def __init__(self, hurried: Callable[[], bool]) -> None:
        self._hurried = hurried
        self.ended = threading.Event()
        self._since = 0.0

    def begin(self) -> None:
        """Call it in the thread that writes."""
        self._since = clock.thread_seconds()

    def rest(self) -> None:
        """Raises Abandoned if `end` was called."""
        worked = clock.thread_seconds() - self._since
        if worked < WORK_S and not self.ended.is_set():
            return
        if self.ended.wait(0.0 if self._hurried() else worked * REST):
            raise Abandoned("this process ends")
        self._since = clock.thread_seconds()

    def end(self) -> None:
        self.ended.set()


class Background:
    """Call it to run a blocking function: `await background(function, *arguments)`. Close it at the end."""

    def __init__(self, hurried: Callable[[], bool] = lambda: False) -> None:
        self._pace = Pace(hurried)
        self._urgent = ThreadPoolExecutor(THREADS, "checkpoints")
        self._writing = ThreadPoolExecutor(1, "write", initializer=lower_priority)

    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        if function is write_part:
            return await loop.run_in_executor(self._writing, self._write_part, *arguments)
        if function is narrow_to_changes:
            return await loop.run_in_executor(self._writing, function, *arguments)
        return await loop.run_in_executor(self._urgent, function, *arguments)

    def _write_part(self, *arguments: Any) -> Summary:
        self._pace.begin()
        return write_part(*arguments, rest=self._pace.rest)

    def close(self) -> None:
        """Do not wait for running work; a part that is being written is abandoned."""
        self._pace.end()
        for pool in (self._urgent, self._writing):
            pool.shutdown(wait=False, cancel_futures=True)


def lower_priority() -> None:
    """Of the calling thread and the threads it starts, on systems where threads have priorities."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)

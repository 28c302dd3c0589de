"""Writes and deletes the files of checkpoints. Everything here blocks.

Snapshot -> pserver-<i>.<token>.safetensors        Manifest -> manifest-<md5>.json
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping

import torch

from trireme_shared.blocks.snapshot import Snapshot
from trireme_shared.checkpoints import stored, tables
from trireme_shared.platform.storage import files, tensor_file
from trireme_shared.platform.storage.tensor_file import Entry, Made, Summary
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.checkpoints import Manifest
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
    """All tensors of a snapshot; `metadata` may be slow to make; `rest` is called between chunks; `checksum`: its name. Raises OSError; InvalidArgument
    if a tensor named in `finite` is not: such a checkpoint must not take the place of a good one."""
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
    return [f"block.{block.number}" for block in layout.blocks() if layout.segments[block.segment].kind == "param"]


def _check_finite(name: str, values: torch.Tensor) -> None:
    bad = 0 if math.isfinite(values.sum().item()) else int((~values.isfinite()).sum())
    if bad:
        msg = f"{bad} of {values.numel()} parameters in {name} are NaN or infinite"
        hint = (
            "go back to the checkpoint before, with a lower learning rate; on_nonfinite = ignore saves such parameters"
        )
        raise InvalidArgument(msg, hint=hint)


def part_metadata(job: str, uuid: str, version: int, timeline: int, index: int, digest: str) -> dict[str, str]:
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

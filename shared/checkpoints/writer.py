"""Writes and deletes the files of checkpoints. Everything here blocks.

Snapshot -> pserver-<i>.<token>.safetensors        Manifest -> manifest-<md5>.json
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from shared.blocks.snapshot import Snapshot
from shared.checkpoints import stored
from shared.records.checkpoints import Manifest
from shared.storage import files, tensor_file
from shared.storage.tensor_file import Entry, Summary


def write_part(
    url: str, metadata: Callable[[], Mapping[str, str]], snapshot: Snapshot, *, rest: Callable[[], None] = lambda: None
) -> Summary:
    """All tensors of a snapshot; `metadata` may be slow to make; `rest` is called between chunks. Raises OSError."""
    tensors = []
    for name, saved in snapshot.tensors.items():
        dtype = str(saved.buffer.tensor.dtype).removeprefix("torch.")
        tensors.append((Entry(name, dtype, saved.shape), saved.buffer.view))
    return tensor_file.write(url, metadata(), tensors, rest)


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

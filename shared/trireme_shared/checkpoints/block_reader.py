"""Blocks with their optimizers' state, out of a part of a checkpoint into memory of whoever loads it.

sink(entry) names the memory for each tensor ─► the whole part is read and its checksum compared ─► loaded: blocks, in order
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from trireme_shared.blocks.buffers import DTYPES, bytes_of
from trireme_shared.checkpoints import stored
from trireme_shared.platform.storage.tensor_file import Entry
from trireme_shared.protocol.errors import CheckpointUnusable
from trireme_shared.protocol.records.checkpoints import CheckpointRef, Manifest
from trireme_shared.protocol.records.layout import Block

M = TypeVar("M")


@dataclass(slots=True)
class _Loading(Generic[M]):
    """One block that is being read."""

    place: Block
    values: M | None = None
    state: dict[str, torch.Tensor] = field(default_factory=dict)


class BlockReader(Generic[M]):
    """Of these blocks in one part. `take(block)`: memory for its values, and their bytes, writable. States get memory of their own."""

    def __init__(
        self, ref: CheckpointRef, blocks: Mapping[int, Block], take: Callable[[Block], tuple[M, memoryview]]
    ) -> None:
        self._ref, self._take = ref, take
        self._loading: dict[int, _Loading[M]] = {number: _Loading(block) for number, block in blocks.items()}

    def sink(self, entry: Entry) -> memoryview | None:
        """Memory for a tensor; None: it is of no block that is wanted. Raises CheckpointUnusable: it has another form."""
        _, number, name = [*entry.name.split(".", 2), "", ""][:3]
        item = self._loading.get(int(number)) if number.isdecimal() else None
        if item is None:
            return None
        if not name:
            if entry.dtype != item.place.dtype or entry.shape != (item.place.elements,):
                wanted = f"block {number} of {item.place.elements} {item.place.dtype}"
                stored.unusable(self._ref, f"it lacks {wanted}: it has {entry.shape} {entry.dtype}")
            item.values, view = self._take(item.place)
            return view
        if entry.shape not in ((), (item.place.elements,)):
            wanted = f"{name} of block {number} for {item.place.elements} elements"
            stored.unusable(self._ref, f"it lacks {wanted}: it has {entry.shape}")
        tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        item.state[name] = tensor
        return bytes_of(tensor.reshape(-1))

    def loaded(self, file: str) -> Iterator[tuple[int, M, dict[str, torch.Tensor]]]:
        """Each block, once the part `file` was read as a whole. Raises CheckpointUnusable: one is missing."""
        for number, item in sorted(self._loading.items()):
            if item.values is None:
                stored.unusable(self._ref, f"it lacks block {number} in {file}")
            yield number, item.values, item.state


def check_model(manifest: Manifest, ref: CheckpointRef, digest: str) -> None:
    """Raises CheckpointUnusable if the checkpoint is not of the model with that digest."""
    if manifest.layout.digest != digest:
        msg = (
            f"checkpoint {ref.uuid} is of model {manifest.layout.digest[:12]}, the job's model is {digest[:12]}: "
            "names, shapes or dtypes of its parameters differ"
        )
        raise CheckpointUnusable(msg, hint="go on with the script the checkpoint was made with, or start a new job")

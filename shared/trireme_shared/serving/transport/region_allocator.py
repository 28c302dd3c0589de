"""Memory of blocks that others on this host may read: cut from few large regions, however large the model."""

from __future__ import annotations

import torch

from trireme_shared.blocks.buffers import Home
from trireme_shared.platform.runtime import telemetry
from trireme_shared.serving.transport.shared_memory import ALIGNMENT_BYTES, Region

REGION_BYTES = 64 << 20  # at least, and a quarter of what there is

log = telemetry.logger("wire.regions")


def new_region(size: int) -> Region | None:
    """None where there is no sealed memfd; the log says why."""
    try:
        return Region.create(size)
    except OSError as error:
        log.info("memory_not_shared", cause=f"{type(error).__name__}: {error}")
        return None


class RegionAllocator:
    """Of one pool; private memory where regions cannot be made. Block by block malloc would take a fifth more than it gives."""

    def __init__(self) -> None:
        self._region: Region | None = None
        self._used = self._total = 0
        self._possible = True

    def __call__(self, size: int) -> tuple[torch.Tensor, Home | None]:
        size_there = -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if self._region is None or self._used + size_there > len(self._region):
            self._begin(max(size_there, REGION_BYTES, self._total // 4))
        if self._region is None or not size:
            return torch.empty(size, dtype=torch.uint8), None
        region, offset = self._region, self._used
        self._used += size_there
        return torch.frombuffer(region, dtype=torch.uint8, count=size, offset=offset), (region, offset)

    def _begin(self, size: int) -> None:
        self._region, self._used = None, 0
        if not self._possible:
            return
        self._region = new_region(size)
        self._possible = self._region is not None
        self._total += size

"""One member of a Gloo group: all_reduce of the same gradients, and the canonical reduction that the communicator has over it."""

from __future__ import annotations

import os
import time
from datetime import timedelta

from benchmarks.collective.contributions import contribution, differing, mean

TIMEOUT_S = 120.0


class GlooMember:
    """`ways`: bucketed (all in flight together), whole (one operation), canonical (all to all, tree, all gather; bits independent of Gloo's algorithm)."""

    def __init__(self, place: int, members: int, store: str) -> None:
        import torch
        from torch import distributed

        from shared.collective.group import Device, Group

        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._members, self._place, self._torch = members, place, distributed
        file = distributed.FileStore(store, members)
        limit = timedelta(seconds=TIMEOUT_S)
        distributed.init_process_group("gloo", store=file, rank=place, world_size=members, timeout=limit)
        ours = distributed.PrefixStore("ours", file)
        self._group = Group(ours, place, members, Device("127.0.0.1"), [None] * members, TIMEOUT_S)

    def begin(self, mib: int, buckets: int) -> None:
        import torch

        self._source = contribution(mib << 18, self._place)
        self._flat = torch.empty_like(self._source)
        self._taken = torch.empty_like(self._source)
        self._buckets = self._flat.chunk(buckets)

    def round(self, at: float, way: str) -> float:
        """Begins at `at`; when it has the result, both of time.monotonic."""
        self._flat.copy_(self._source)
        self._torch.barrier()
        time.sleep(max(0.0, at - time.monotonic()))
        if way == "canonical":
            self._canonical()
        else:
            parts = self._buckets if way == "bucketed" else (self._flat,)
            works = [self._torch.all_reduce(part, async_op=True) for part in parts]
            for work in works:
                work.wait()
        return time.monotonic()

    def _canonical(self) -> None:
        """As AllReduce with reduction="canonical" does it with one flat buffer."""
        from shared.collective.operations import tree

        group, flat, taken = self._group, self._flat, self._taken
        group.scatter_all(flat, taken, TIMEOUT_S, _nothing)
        share = tree(list(taken.view(group.size, -1)), [1.0] * group.size)
        group.gather_all(share.contiguous(), flat, TIMEOUT_S)

    def check(self, way: str) -> int:
        """How many elements of the last result are wrong: of the canonical one in a bit, of Gloo's sums by more than rounding."""
        if way == "canonical":
            return differing(self._flat, self._members)
        expected = mean(self._flat.numel(), self._members)
        return int(((self._flat / self._members - expected).abs() > 1e-5).sum())


def _nothing() -> None:
    """No phase."""

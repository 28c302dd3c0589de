"""One member of a Gloo group: all_reduce of the same gradients, and the canonical reduction that the
communicator has over it."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

from benchmarks.collective.contributions import contribution, differing, mean

TIMEOUT_S = 120.0
NATIVE = ("native", "native-fast")


class GlooMember:
    """`ways`: bucketed (all in flight together), whole (one operation), canonical (all to all, tree, all
    gather; bits independent of Gloo's algorithm); native, native-fast: as trainers of a job with native
    exchange do it, in buckets of the default size."""

    def __init__(self, place: int, members: int, store: str) -> None:
        import torch
        from torch import distributed

        from trireme_shared.collective.group import Device, Group

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
        self._native = _Native(self._source, self._flat, self._place, self._members)

    def round(self, at: float, way: str) -> float:
        """Begins at `at`; when it has the result, both of time.monotonic."""
        self._flat.copy_(self._source)
        self._torch.barrier()
        time.sleep(max(0.0, at - time.monotonic()))
        if way == "canonical":
            self._canonical()
        elif way in NATIVE:
            self._native.round(self._group, way)
        else:
            parts = self._buckets if way == "bucketed" else (self._flat,)
            works = [self._torch.all_reduce(part, async_op=True) for part in parts]
            for work in works:
                work.wait()
        return time.monotonic()

    def _canonical(self) -> None:
        """As AllReduce with reduction="canonical" does it with one flat buffer."""
        from trireme_shared.collective.operations import tree

        group, flat, taken = self._group, self._flat, self._taken
        group.scatter_all(flat, taken, TIMEOUT_S, _nothing)
        share = tree(list(taken.view(group.size, -1)), [1.0] * group.size)
        group.gather_all(share.contiguous(), flat, TIMEOUT_S)

    def check(self, way: str) -> int:
        """How many elements of the last result are wrong: of the canonical one in a bit, of Gloo's sums by
        more than rounding."""
        if way in ("canonical", "native"):
            return differing(self._flat, self._members)
        expected = mean(self._flat.numel(), self._members)
        found = self._flat if way in NATIVE else self._flat / self._members
        return int(((found - expected).abs() > 1e-5).sum())


class _Native:
    """One lane for each member; `source` is this one's gradient, `flat` gets the mean. In blocks of 1 MiB."""

    def __init__(self, source: Any, flat: Any, place: int, members: int) -> None:
        from trainer_agent.collective.native.reducing import ChosenNode, Scratch, buckets_of
        from trireme_shared.blocks.buffers import bytes_of
        from trireme_shared.protocol.records import JobSpec, Mode
        from trireme_shared.protocol.records.layout import Layout, OptimizerSpec, Segment
        from trireme_shared.protocol.wire.messages import PushHeader

        segment = Segment(kind="param", dtype="float32", elements=flat.numel(), group=0)
        optimizer = OptimizerSpec(name="SGD", defaults={}, groups=({"lr": 0.1},))
        layout = Layout(segments=(segment,), block_bytes=1 << 20, digest="d", optimizer=optimizer)
        self._lanes, self._scratch = (place, place + 1), Scratch()
        self._buckets = buckets_of(
            layout, layout.payloads("float32"), JobSpec.model_fields["bucket_bytes"].default
        )
        first, memory = 0, bytes_of(source)
        self._given, self._outs = {}, {}
        for block in layout.blocks():
            self._given[block.number] = memory[4 * first : 4 * (first + block.elements)]
            self._outs[block.number] = flat[first : first + block.elements]
            first += block.elements
        header = PushHeader(
            job="benchmark", generation=1, mode=Mode.SYNC, trainer="benchmark", step=0, timeline=0
        )
        self._nodes = [ChosenNode((rank, rank + 1), 1, rank, header, None) for rank in range(members)]

    def round(self, group: Any, way: str) -> None:
        from trainer_agent.collective.native.reducing import canonical, fast

        reduce = canonical if way == "native" else fast
        for bucket in self._buckets:
            payloads = {self._lanes: [self._given[number] for number in bucket.numbers]}
            outs = [self._outs[number] for number in bucket.numbers]
            reduce(group, bucket, self._nodes, payloads, outs, self._scratch, TIMEOUT_S)


def _nothing() -> None:
    """No phase."""

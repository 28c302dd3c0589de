"""Minibatches whose loss is not finite, in jobs that leave them out of the step (`on_nonfinite = skip`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.simulation.compute import TinyCompute, names_of
from trainer_agent.model.compute import BlockSink, LaneResult, Ready, Records
from trireme_shared.protocol.lanes import Interval


def is_nonfinite(names: Sequence[int]) -> bool:
    """Of the minibatch of these records, in any epoch."""
    return bool(names) and sum(names) % 4 == 1


def trained(names: Sequence[int], *, skips: bool) -> Sequence[int]:
    """What a step takes of them."""
    return () if skips and is_nonfinite(names) else names


class SkippingCompute(TinyCompute):
    """As TorchCompute: the lane has no records then."""

    _left_out: LaneResult | None = None

    async def gradient(
        self,
        node: Interval,
        lane: int,
        seed: int,
        records: Records | None,
        sink: BlockSink,
        ready: Ready | None = None,
    ) -> LaneResult:
        names = names_of(records)
        self._left_out = LaneResult(0.0, 0, len(names)) if is_nonfinite(names) else None
        if self._left_out is None:
            return await super().gradient(node, lane, seed, records, sink, ready)
        await asyncio.sleep(self._speed.draw(self._rng))
        await super().gradient(node, lane, seed, None, sink)
        return self._left_out

    def result(self) -> LaneResult:
        return self._left_out or super().result()

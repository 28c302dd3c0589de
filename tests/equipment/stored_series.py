"""A job's metrics on its storage, written as a master writes them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from master_service.control.series_keeper import SeriesKeeper
from master_service.storage.series_files import StoredSeries
from trireme_shared.protocol.records import MetricBatch, StepMetrics


def step(number: int) -> StepMetrics:
    return StepMetrics(step=number, epoch=number // 5, loss_sum=8.0 / 2**number, records=4, lr=(0.1,))


async def store(folder: Path, steps: Iterable[int], term: int = 1) -> None:
    """Of one term."""
    keeper = SeriesKeeper(StoredSeries(str(folder)), term)
    running = asyncio.ensure_future(keeper.run())
    while keeper.taken.next is None:
        await asyncio.sleep(0.01)
    keeper.note(MetricBatch(trainer="trainer-0", steps=tuple(map(step, steps)), whole=True))
    await keeper.store()
    running.cancel()
    await asyncio.wait([running])

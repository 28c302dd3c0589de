"""What a resize costs, live and by a restart: python -m benchmarks.resize [--mib 64] [--rounds 3] [--json]

One trainer trains a model of --mib MiB of parameters with Adam (four times as many bytes of state: values of
two versions, two tensors of the optimizer) on one parameter server. In each round it is resized to two and to
three while it trains, back to one, and to two and three again by the strategy `restart` (checkpoint, load). A
step is the time between two calls of the user's `loss`: forward, backward, push, optimizer, pull. Shown are
medians over the rounds: the longest step during a resize, and the longest in the seconds before it, both
beyond the median step of those seconds; by how much all steps during it were longer than that; the bytes that
were sent against the fewest that make the loads even, and the prediction of a dry run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from trireme.client import ONLY_JOB, AsyncClient
from trireme.launch.cluster import LocalCluster
from trireme.launch.supervision import ClusterSettings
from trireme.view.job_address import client_of
from trireme_shared.platform.runtime import ids, telemetry
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.datasets import Npy
from trireme_shared.protocol.records.operations import Strategy
from trireme_shared.protocol.rest import ResizeView

MIB = 1 << 20
STATES = 4  # values of two versions, and Adam's two tensors
CALM_S = 6.0
SETTLE_S = 2.0
RESIZE_S = 240.0
SIZES = ((1, 2), (2, 3))
STRATEGIES = ("live", "restart")
GOAL_MS = 250


@dataclass(frozen=True)
class Row:
    """Milliseconds of steps, MiB of payloads. `lost_ms`: the sum over the steps during the resize, beyond the
    median before it."""

    strategy: str
    before: int
    after: int
    steps_before: int
    median_ms: float
    steps_during: int
    median_during_ms: float
    longest_beyond_ms: float
    lost_ms: float
    longest_before_beyond_ms: float
    longest_pause_ms: float
    seconds: float
    groups: int
    moved_mib: float
    predicted_mib: float
    fewest_mib: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=64, help="of parameters, a multiple of 16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    telemetry.configure(level="ERROR", json=False)
    with tempfile.TemporaryDirectory(prefix="trireme-resize-") as folder:
        rows = asyncio.run(measure(Path(folder), arguments.mib, arguments.rounds))
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(
        "| pservers | step before | longest before, beyond it | longest during, beyond it | median "
        "during | lost altogether "
        "| longest pause of a group | took | sent | dry run | fewest "
        "|\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for row in medians(rows):
        goal = f" (goal {GOAL_MS})" if row.strategy == "live" else ""
        print(
            f"| {row.before} to {row.after}, {row.strategy} | {row.median_ms:.0f} ms | "
            f"{row.longest_before_beyond_ms:.0f} ms "
            f"| {row.longest_beyond_ms:.0f} ms{goal} | {row.median_during_ms:.0f} ms, "
            f"{row.steps_during} steps | {row.lost_ms:.0f} ms "
            f"| {row.longest_pause_ms:.0f} ms | {row.seconds:.1f} s, {row.groups} groups | "
            f"{row.moved_mib:.1f} MiB "
            f"| {row.predicted_mib:.1f} MiB | {row.fewest_mib:.1f} MiB |"
        )


def medians(rows: list[Row]) -> list[Row]:
    """One row for each kind of resize: of each number the median over the rounds."""
    kinds: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row.strategy, row.before, row.after), []).append(row)
    numbers = [field.name for field in fields(Row) if field.name != "strategy"]
    return [
        replace(
            same[0], **{name: statistics.median_high(getattr(row, name) for row in same) for name in numbers}
        )
        for same in kinds.values()
    ]


async def measure(folder: Path, mib: int, rounds: int) -> list[Row]:
    times = folder / "times"
    times.touch()
    np.save(folder / "x.npy", np.random.default_rng(0).standard_normal((160_000, 2048), dtype=np.float32))
    spec = JobSpec(
        job="resize",
        script=str(Path(__file__).parent / "scripts" / "resized.py"),
        dataset=Npy(str(folder / "x.npy"), aligned=True),
        storage=str(folder / "run"),
        epochs=1000,
        lanes=1,
        global_batch_size=16,
        records_per_task=1600,
        trainers=1,
        pservers=1,
        checkpoint_every_epochs=None,
    )
    os.environ |= {"RESIZED_MIB": str(mib), "RESIZED_TIMES": str(times)}
    settings = {"RESIZED_MIB": str(mib), "RESIZED_TIMES": str(times)}
    async with LocalCluster(spec, folder / "run", ClusterSettings(environment=settings)) as cluster:
        await steps_done(times, 20)
        rows = []
        for _ in range(rounds):
            for strategy in STRATEGIES:
                rows += [await resized(cluster, times, mib, strategy, *size) for size in SIZES]
                async with client_of(await cluster.master_url(), timeout_s=RESIZE_S) as client:
                    await ended(client, SIZES[0][0], "live")
        return rows


async def resized(
    cluster: LocalCluster, times: Path, mib: int, strategy: str, before: int, after: int
) -> Row:
    await asyncio.sleep(SETTLE_S)
    first = time.monotonic()
    await asyncio.sleep(CALM_S)
    async with client_of(await cluster.master_url(), timeout_s=RESIZE_S) as client:
        predicted = await client.predict_resize(ONLY_JOB, pservers=after)
        begin = time.monotonic()
        found = await ended(client, after, strategy)
        end = time.monotonic()
    assert found.phase == "COMMITTED", found
    await asyncio.sleep(SETTLE_S)
    calm, during = steps_between(times, first, begin), steps_between(times, begin, end + SETTLE_S)
    median = statistics.median(calm)
    return Row(
        strategy=strategy,
        before=before,
        after=after,
        steps_before=len(calm),
        median_ms=median,
        steps_during=len(during),
        median_during_ms=statistics.median(during),
        longest_beyond_ms=max(during) - median,
        lost_ms=sum(during) - median * len(during),
        longest_before_beyond_ms=max(calm) - median,
        longest_pause_ms=1000 * found.longest_pause_s,
        seconds=end - begin,
        groups=found.groups,
        moved_mib=found.bytes_moved / MIB,
        predicted_mib=predicted.bytes / MIB,
        fewest_mib=fewest(mib, before, after),
    )


async def ended(client: AsyncClient, pservers: int, strategy: Strategy) -> ResizeView:
    """The resize once it has ended."""
    key = ids.new_id("benchmark")
    made = await client.create_resize(ONLY_JOB, key=key, pservers=pservers, strategy=strategy)
    return await client.wait_for_resize(ONLY_JOB, made.operation_id, timeout_s=RESIZE_S)


def fewest(mib: int, before: int, after: int) -> float:
    """MiB that must move until each of `after` has as many blocks of 1 MiB as it can have, and no more. From
    even loads."""
    held = [mib // before + (index < mib % before) for index in range(before)] + [0] * (after - before)
    shares = sorted((mib // after + (index < mib % after) for index in range(after)), reverse=True)
    return STATES * sum(
        max(0, have - share) for have, share in zip(sorted(held, reverse=True), shares, strict=True)
    )


def steps_between(times: Path, first: float, last: float) -> list[float]:
    """Milliseconds of the steps that lie in it."""
    noted = [float(line) for line in times.read_text().split()]
    return [1000 * (after - before) for before, after in pairwise(noted) if first <= before and after <= last]


async def steps_done(times: Path, count: int) -> None:
    async with asyncio.timeout(120):
        while len(times.read_text().split()) < count:
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    main()

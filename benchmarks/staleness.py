"""Asynchronous digits with one trainer of four five times slower than the others: accuracy and loss with and
without a rate that follows the age of a push (lr_staleness_modulation) and bounded staleness (max_staleness).

    python -m benchmarks.staleness [--seeds 1,2,3] [--epochs 6] [--rate 0.1] [--bound 6] [--markdown | --json]

4 trainers, 2 parameter servers, as `trireme run` starts them. From the first minibatch on trainer-3 is
stopped and continued (SIGSTOP, SIGCONT), so that it runs a fifth of the time. A minibatch sleeps 20 times 1
ms (scripts/digits_waiting.py): the processors are not the limit. At the end each parameter server is asked
for its ledger: each block must have had each minibatch of each epoch once, or the command fails. (Not a
checkpoint: the job may be over before that of the end of training is written.)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from benchmarks.stragglers import SLOW, slowed
from trainer_agent.data_plane.http import HttpPserver
from trireme.launch.cluster import LocalCluster
from trireme.launch.supervision import ClusterSettings
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.records import JobSpec, Mode, Phase
from trireme_shared.protocol.records.datasets import Parquet
from trireme_shared.protocol.wire.messages import EpochLedger

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "scripts" / "digits_waiting.py"
DATA = ROOT / "examples" / "digits" / "data"
TRAINERS, BATCH, TASK_RECORDS, LIMIT_S = 4, 32, 128, 300.0


@dataclass(frozen=True)
class Way:
    title: str
    modulated: bool
    bounded: bool


WAYS = (
    Way("neither", modulated=False, bounded=False),
    Way("lr_staleness_modulation", modulated=True, bounded=False),
    Way("max_staleness", modulated=False, bounded=True),
    Way("both", modulated=True, bounded=True),
)


@dataclass(frozen=True)
class Found:
    """`accuracy`: of the test images, 0 to 1. `minibatches`: that each block had, of all epochs.
    `duplicates`: pushes of blocks that came again."""

    accuracy: float
    loss: float
    seconds: float
    minibatches: int
    duplicates: int


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate of SGD with momentum 0.9")
    parser.add_argument("--bound", type=int, default=6, help="max_staleness where it is set")
    parser.add_argument("--markdown", action="store_true", help="the default")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    telemetry.configure(level="ERROR", json=False)
    subprocess.run(
        [sys.executable, ROOT / "examples" / "digits" / "prepare.py"], check=True, stdout=subprocess.DEVNULL
    )
    rows: dict[str, list[Found]] = {way.title: [] for way in WAYS}
    for seed in map(int, given.seeds.split(",")):
        for way in WAYS:
            with tempfile.TemporaryDirectory(prefix="trireme-staleness-") as folder:
                found = asyncio.run(measure(Path(folder), way, seed, given.epochs, given.rate, given.bound))
            rows[way.title].append(found)
            print(f"{way.title}, seed {seed}: {found}", file=sys.stderr, flush=True)
    if given.json:
        print(json.dumps({title: [vars(found) for found in each] for title, each in rows.items()}, indent=1))
    else:
        print(table(rows, given.bound))


async def measure(folder: Path, way: Way, seed: int, epochs: int, rate: float, bound: int) -> Found:
    """Raises SystemExit: the job failed, or a minibatch was not applied exactly once."""
    spec = spec_of(folder, way, seed, epochs, bound)
    began = time.monotonic()
    async with LocalCluster(
        spec, folder / "run", ClusterSettings(environment={"LEARNING_RATE": str(rate)})
    ) as cluster:
        while not (
            cluster.directory.state
            and cluster.directory.state.phase in (Phase.RUNNING, Phase.COMPLETED, Phase.FAILED)
        ):
            await asyncio.sleep(0.02)
        trained = time.monotonic()
        async with slowed(cluster, SLOW):
            state = await cluster.wait(LIMIT_S)
        ended = time.monotonic()
        ledgers = await ledgers_of(cluster) if state.phase is Phase.COMPLETED else {}
    if state.phase is not Phase.COMPLETED or state.result is None:
        raise SystemExit(f"the job failed after {ended - began:.0f} s: {state.reason}")
    if state.result.discarded_records or any((state.result.losses.lost, state.result.losses.skipped)):
        raise SystemExit(f"records were lost: {state.result}")
    minibatches, duplicates = checked_ledgers(spec, ledgers)
    metrics = state.result.metrics
    return Found(metrics["accuracy"], metrics["test_loss"], ended - trained, minibatches, duplicates)


async def ledgers_of(cluster: LocalCluster) -> dict[int, tuple[EpochLedger, ...]]:
    """By index of the parameter server. They live until the cluster is closed."""
    found = {}
    for index, member in cluster.directory.pservers.items():
        pserver = HttpPserver(member, "")
        try:
            found[index] = (await pserver.info()).ledger
        finally:
            await pserver.close()
    return found


def checked_ledgers(spec: JobSpec, ledgers: Mapping[int, Sequence[EpochLedger]]) -> tuple[int, int]:
    """Minibatches that each block has had, and duplicates. Raises SystemExit: some are missing, or there
    twice."""
    if sorted(ledgers) != list(range(spec.pservers)):
        raise SystemExit(f"{sorted(ledgers)} of {spec.pservers} parameter servers have answered")
    expected = dict.fromkeys(range(spec.epochs), minibatches_of_an_epoch())
    for index, ledger in ledgers.items():
        had = {entry.epoch: {entry.applied_lowest, entry.applied_highest} for entry in ledger}
        if had != {epoch: {number} for epoch, number in expected.items()}:
            raise SystemExit(f"pserver-{index} has applied {had} minibatches by epoch; expected {expected}")
    duplicates = sum(entry.duplicates for ledger in ledgers.values() for entry in ledger)
    return sum(expected.values()), duplicates


def minibatches_of_an_epoch() -> int:
    """Tasks do not span files, minibatches do not span tasks."""
    count = 0
    for path in sorted(DATA.glob("train-*.parquet")):
        rows = pq.read_metadata(path).num_rows
        tasks = [min(TASK_RECORDS, rows - first) for first in range(0, rows, TASK_RECORDS)]
        count += sum(-(-records // BATCH) for records in tasks)
    return count


def spec_of(folder: Path, way: Way, seed: int, epochs: int, bound: int) -> JobSpec:
    return JobSpec(
        job="staleness",
        script=str(SCRIPT),
        dataset=Parquet(f"{DATA}/train-*.parquet"),
        evaluation_dataset=Parquet(f"{DATA}/test.parquet"),
        storage=str(folder / "storage"),
        mode=Mode.ASYNC,
        epochs=epochs,
        global_batch_size=BATCH,
        records_per_task=TASK_RECORDS,
        seed=seed,
        trainers=TRAINERS,
        pservers=2,
        block_bytes=1 << 16,
        lr_staleness_modulation=way.modulated,
        max_staleness=bound if way.bounded else None,
    )


def table(rows: dict[str, list[Found]], bound: int) -> str:
    lines = [
        (
            "| rate by age, bound | accuracy %, median (lowest-highest) | test loss, median "
            "(lowest-highest) | seconds, median |"
        )
    ]
    lines.append("|---|---|---|---|")
    for title, found in rows.items():
        accuracies, losses = [100 * each.accuracy for each in found], [each.loss for each in found]
        seconds = statistics.median(each.seconds for each in found)
        name = title.replace("max_staleness", f"max_staleness = {bound}")
        lines.append(f"| {name} | {spread(accuracies, 1)} | {spread(losses, 3)} | {seconds:.1f} |")
    every = [each for found in rows.values() for each in found]
    lines.append("")
    lines.append(
        f"{len(every)} runs; by the ledgers each block had each of {every[0].minibatches} minibatches once "
        f"({sum(each.duplicates for each in every)} blocks were pushed again, and not applied)"
    )
    return "\n".join(lines)


def spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


if __name__ == "__main__":
    main()

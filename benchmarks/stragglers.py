"""What a slow trainer costs, with straggler control off and on: python -m benchmarks.stragglers [--steps 150]
[--markdown]

4 trainers, 16 lanes, 2 parameter servers, as `trireme run` starts them. After a few steps one trainer is
stopped and continued (SIGSTOP, SIGCONT) so that it runs a fifth of the time, until the job ends. A minibatch
sleeps 20 times 1 ms (scripts/stragglers.py): the processors are not the limit, also not on two cores. Both
jobs train the same steps; their parameters must be the same bits.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from trireme.launch.cluster import LocalCluster
from trireme.view.job_address import client_of
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import PeerError
from trireme_shared.protocol.records import JobSpec, Phase
from trireme_shared.protocol.records.datasets import Npy

SCRIPT = Path(__file__).parent / "scripts" / "stragglers.py"
RECORDS, BATCH, LANES, TRAINERS = 320, 32, 16, 4
SLOW = "trainer-3"
RUNS_S, STOPS_S = 0.02, 0.08
BEFORE, LIMIT_S = 10, 600.0


@dataclass(frozen=True)
class Measured:
    """`steps_per_s`: from the first stop to the last step. `calm`: before it."""

    steps_per_s: float
    calm: float
    lanes: int
    generations: int
    parameters: dict[str, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rebalance", type=float, default=5.0, help="rebalance_s of the job")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    telemetry.configure(level="ERROR", json=False)
    epochs = -(-arguments.steps * BATCH // RECORDS)
    found = {}
    for control in ("off", "on"):
        with tempfile.TemporaryDirectory(prefix="trireme-stragglers-") as folder:
            found[control] = asyncio.run(measure(Path(folder), control, epochs, arguments.rebalance))
    off, on = found["off"], found["on"]
    same = all(torch.equal(off.parameters[name], on.parameters[name]) for name in off.parameters)
    if arguments.markdown:
        print(
            "| stragglers | steps/s with a slow trainer | before it was slow | its lanes at the "
            "end |\n|---|---|---|---|"
        )
    for control, row in found.items():
        if arguments.markdown:
            print(f"| {control} | {row.steps_per_s:.2f} | {row.calm:.2f} | {row.lanes} of {LANES} |")
        else:
            print(
                f"stragglers {control}: {row.steps_per_s:.2f} steps/s with a slow trainer, "
                f"{row.calm:.2f} before; "
                f"it has {row.lanes} of {LANES} lanes in generation {row.generations}"
            )
    print(
        f"on / off: {on.steps_per_s / off.steps_per_s:.2f}; parameters "
        f"{'the same bits' if same else 'DIFFER'}"
    )
    if not same:
        raise SystemExit(1)


async def measure(folder: Path, control: Literal["off", "on"], epochs: int, rebalance_s: float) -> Measured:
    async with LocalCluster(spec_of(folder, control, epochs, rebalance_s), folder / "run") as cluster:
        began_at, began = await reached(cluster, 2)
        slow_at, slow_from = await reached(cluster, BEFORE)
        async with slowed(cluster, SLOW):
            last_at, last = slow_at, slow_from
            lanes = 0
            while not (cluster.directory.state and cluster.directory.state.phase.final):
                step = await steps_done(cluster)
                if step is not None and step > last:
                    last_at, last = time.monotonic(), step
                trainers = cluster.directory.trainers
                name = next((name for name in trainers.names if name.startswith(f"{SLOW}-")), "")
                lanes = len(range(*trainers.lanes_of(name))) if name else lanes
                await asyncio.sleep(0.05)
        state = await cluster.wait(LIMIT_S)
        if state.phase is not Phase.COMPLETED:
            raise SystemExit(f"the job failed: {state.reason}")
        parameters = torch.load(state.result.exports["state_dict"], weights_only=True)
    calm = (slow_from - began) / (slow_at - began_at)
    return Measured((last - slow_from) / (last_at - slow_at), calm, lanes, state.generation, parameters)


def spec_of(folder: Path, control: Literal["off", "on"], epochs: int, rebalance_s: float) -> JobSpec:
    numbers = np.random.default_rng(0)
    np.save(folder / "x.npy", numbers.standard_normal((RECORDS, 16)).astype(np.float32))
    np.save(folder / "y.npy", numbers.standard_normal(RECORDS).astype(np.float32))
    script = Path(shutil.copy(SCRIPT, folder))
    return JobSpec(
        job="stragglers",
        script=str(script),
        dataset=Npy(str(folder / "x.npy"), str(folder / "y.npy"), aligned=True),
        storage=str(folder / "run"),
        epochs=epochs,
        global_batch_size=BATCH,
        lanes=LANES,
        records_per_task=20,
        seed=1,
        trainers=TRAINERS,
        pservers=2,
        checkpoint_every_epochs=None,
        stragglers=control,
        rebalance_s=rebalance_s,
    )


@asynccontextmanager
async def slowed(cluster: LocalCluster, name: str) -> AsyncIterator[None]:
    """The process runs RUNS_S, is stopped STOPS_S, and so on."""

    async def cycle() -> None:
        while True:
            cluster.kill(name, signal.SIGSTOP)
            try:
                await asyncio.sleep(STOPS_S)
            finally:
                cluster.kill(name, signal.SIGCONT)
            await asyncio.sleep(RUNS_S)

    cycling = asyncio.create_task(cycle())
    try:
        yield
    finally:
        cycling.cancel()
        with suppress(asyncio.CancelledError, ProcessLookupError, KeyError):
            await cycling


async def reached(cluster: LocalCluster, step: int) -> tuple[float, int]:
    """When the job had done that many steps, and how many it had done then."""
    async with asyncio.timeout(LIMIT_S):
        while (done := await steps_done(cluster) or 0) < step:
            await asyncio.sleep(0.02)
    return time.monotonic(), done


async def steps_done(cluster: LocalCluster) -> int | None:
    with suppress(PeerError):
        async with client_of(await cluster.master_url()) as client:
            return (await client.get_job(cluster.spec.job)).progress.step
    return None


if __name__ == "__main__":
    main()

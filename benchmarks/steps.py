"""Training steps per second: plain PyTorch, DDP over gloo, and ours, on real models at the same global batch.

    python -m benchmarks.steps [--models charlm,mlp] [--rows plain,ddp,...] [--rounds 3] [--seconds 8] [--markdown | --json]

Every row trains the same script in processes of its own, one torch thread each; a round starts, warms up, measures and
stops each row in turn. Rows of one round share the machine's mood, so ratios are taken round by round. An asynchronous
step is a global batch of records applied at the parameter servers, so all rows count the same records.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shared import clock
from trainer_agent import user_module
from trainer_agent.pservers import HttpPserver
from trireme.local import LocalCluster
from trireme.plain import plain_spec

HERE = Path(__file__).resolve().parent
SCRIPTS = {"charlm": HERE.parent / "examples" / "charlm" / "charlm.py", "mlp": HERE / "scripts" / "mlp.py"}
BATCHES = {"charlm": 32, "mlp": 256}
TITLES = {
    "plain": "plain PyTorch, 1 process",
    "ddp": "DDP over gloo, 2 ranks",
    "sync1": "ours, sync, 2 trainers, 1 pserver",
    "sync2": "ours, sync, 2 trainers, 2 pservers",
    "async1": "ours, async, 2 trainers, 1 pserver",
    "async2": "ours, async, 2 trainers, 2 pservers",
}
START_S, WARM_UP_S, WARM_UP_STEPS = 90.0, 1.0, 5


@dataclass
class Row:
    """Steps per second, and the median of the rounds' ratios to the other rows' steps per second."""

    row: str
    model: str
    median: float
    lowest: float
    highest: float
    ratios: dict[str, float]


def torch_rate(script: Path, batch: int, ranks: int, seconds: float, folder: Path) -> float:
    store = folder / f"store-{os.urandom(6).hex()}"
    shared = [
        str(script),
        "--batch",
        str(batch),
        "--ranks",
        str(ranks),
        "--store",
        str(store),
        "--seconds",
        str(seconds),
    ]
    commands = [[sys.executable, "-m", "benchmarks.torch_steps", *shared, "--rank", str(rank)] for rank in range(ranks)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    try:
        answers = [process.communicate(timeout=START_S + seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    found = json.loads(answers[0])
    return float(found["steps"] / found["seconds"])


async def our_rate(script: Path, batch: int, mode: str, pservers: int, seconds: float, folder: Path) -> float:
    """Counted at the parameter servers, between two looks at them."""
    one_lane = plain_spec(user_module.load(script), {})
    changes: dict[str, Any] = {
        "mode": mode,
        "lanes": 2,
        "trainers": 2,
        "pservers": pservers,
        "epochs": 100_000,
        "global_batch_size": batch,
        "checkpoint_every_epochs": None,
        "evaluation_dataset": None,
        "records_per_task": None,
        "storage": str(folder / "run"),
    }
    spec = type(one_lane).model_validate({**one_lane.model_dump(), **changes})
    async with LocalCluster(spec, folder / "run") as cluster:
        async with asyncio.timeout(START_S):
            while await _updates(cluster) < WARM_UP_STEPS:
                await asyncio.sleep(0.2)
        await asyncio.sleep(WARM_UP_S)
        before, started = await _updates(cluster), clock.monotonic()
        await asyncio.sleep(seconds)
        after, ended = await _updates(cluster), clock.monotonic()
    return (after - before) / (ended - started)


async def _updates(cluster: LocalCluster) -> float:
    """Optimizer steps so far, of the mean block."""
    members = [pserver for pserver in cluster.directory.pservers.values() if pserver.url]
    if len(members) < cluster.spec.pservers:
        return 0.0
    updates = blocks = 0
    for member in members:
        async with HttpPserver(member) as pserver:
            info = await pserver.info()
            updates, blocks = updates + info.updates, blocks + info.blocks
    return updates / blocks if blocks else 0.0


def rate_of(row: str, model: str, seconds: float, folder: Path) -> float:
    script, batch = SCRIPTS[model], BATCHES[model]
    if row in {"plain", "ddp"}:
        return torch_rate(script, batch, 1 if row == "plain" else 2, seconds, folder)
    return asyncio.run(our_rate(script, batch, row[:-1], int(row[-1]), seconds, folder))


def measure(model: str, names: Sequence[str], rounds: int, seconds: float, folder: Path) -> list[Row]:
    user_module.load(SCRIPTS[model]).dataset()  # writes the data, once
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        order = names if number % 2 == 0 else names[::-1]
        for name in order:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                rates[name].append(rate_of(name, model, seconds, Path(place)))
            print(
                f"{model} round {number + 1}/{rounds}: {TITLES[name]}: {rates[name][-1]:.2f} steps/s", file=sys.stderr
            )
    return [
        Row(
            name,
            model,
            statistics.median(rates[name]),
            min(rates[name]),
            max(rates[name]),
            {
                other: statistics.median(a / b for a, b in zip(rates[name], rates[other], strict=True))
                for other in ("plain", "ddp")
                if other in rates
            },
        )
        for name in names
    ]


HEAD = "| model | what | steps/s | lowest-highest | x plain | x DDP |\n|---|---|---|---|---|---|"


def table(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        ratios = " | ".join(f"{row.ratios[k]:.2f}" if k in row.ratios else "" for k in ("plain", "ddp"))
        spread = f"{row.lowest:.2f}-{row.highest:.2f}"
        lines.append(f"| {row.model} | {TITLES[row.row]} | {row.median:.2f} | {spread} | {ratios} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SCRIPTS))
    parser.add_argument("--rows", default=",".join(TITLES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="measured per row and round")
    parser.add_argument("--markdown", action="store_true", help="the default")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    names = given.rows.split(",")
    if unknown := [name for name in (*names, *given.models.split(",")) if name not in {*TITLES, *SCRIPTS}]:
        parser.error(f"unknown: {', '.join(unknown)}; rows are {', '.join(TITLES)}, models {', '.join(SCRIPTS)}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory, contextlib.suppress(KeyboardInterrupt):
        os.environ["STEPS_DATA"] = directory
        for model in given.models.split(","):
            found = measure(model, names, given.rounds, given.seconds, Path(directory))
            if not given.json:
                print(table(found) if rows else f"{HEAD}\n{table(found)}", flush=True)
            rows += found
    if given.json:
        machine = {"cpus": os.cpu_count(), "machine": platform.platform(), "python": platform.python_version()}
        print(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()

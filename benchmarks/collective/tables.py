"""Jobs with embedding tables: samples/s of the collective strategy beside parameter servers and
DistributedDataParallel over Gloo, with the same model, global batch and threads.

deepfm    examples/deepfm/deepfm.py: five tables, 2,700 rows of 9 numbers, batches of 256. Peers: gradients of
          tables sparse (Gloo's sparse all_reduce), and dense
clicks    examples/deepfm/clicks.py: one table of --table-rows rows of 16 numbers, batches of 4096
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.accuracy import said, trireme_run
from benchmarks.collective.exchange import progress
from benchmarks.scripts.ctr_synthetic import generate
from benchmarks.spread import spread
from benchmarks.step_rows import ROOT, OurRow, Row, TorchRow, Window, in_turns, stopped

HERE = Path(ROOT)
SCRIPTS = {
    "deepfm": (
        HERE / "examples" / "deepfm" / "deepfm.py",
        HERE / "benchmarks" / "scripts" / "deepfm_plain.py",
    ),
    "clicks": (
        HERE / "examples" / "deepfm" / "clicks.py",
        HERE / "benchmarks" / "scripts" / "clicks_plain.py",
    ),
}
BATCHES = {"deepfm": 256, "clicks": 4096}
TITLES = {
    "ddp-dense": "DDP over Gloo, dense gradients of tables",
    "ddp": "DDP over Gloo, sparse gradients of tables",
    "ours": "collective",
    "ps1": "1 parameter server",
    "ps2": "2 parameter servers",
}
TRAINERS, MEMORY_BATCHES = 2, 64
EPOCHS, MOST_DIFFERENCE, RUN_S = 2, 0.01, 300.0  # of the check of losses
DENSE = "DEEPFM_DENSE"
HEAD = (
    "| model | what | samples/s | x DDP, the faster one | CPU ms of a step: trainers + parameter "
    "servers + rest | others' cores |\n|---|---|---|---|---|---|"
)


def names_of(model: str) -> list[str]:
    return [name for name in TITLES if model == "deepfm" or name != "ddp-dense"]


def row_of(name: str, model: str, folder: Path) -> Row:
    (ours, plain), batch = SCRIPTS[model], BATCHES[model]
    if name.startswith("ddp"):
        more = {"batches": MEMORY_BATCHES}
        return TorchRow(
            plain, batch, TRAINERS, True, folder, more, {DENSE: "1"} if name == "ddp-dense" else {}
        )
    if name == "ours":
        return OurRow(ours, batch, "collective", 0, folder, trainers=TRAINERS)
    return OurRow(ours, batch, "sync", int(name[-1]), folder, trainers=TRAINERS)


async def measure(
    model: str, names: Sequence[str], rounds: int, seconds: float, folder: Path
) -> dict[str, list[Window]]:
    """All rows are started once and stopped; a round lets one after the other go on."""

    def told(number: int, name: str, window: Window) -> None:
        rate = f"{window.steps_per_s * BATCHES[model]:.0f} samples/s"
        progress(f"{model}, round {number + 1}/{rounds}: {TITLES[name]}: {rate}")

    async with AsyncExitStack() as stack:
        rows = {name: await stopped(stack, row_of(name, model, folder / f"{model}-{name}")) for name in names}
        return await in_turns(rows, rounds, seconds, told)


def write_clicks(folder: Path, rows: int) -> None:
    """The made-up samples, for all members that are started after this."""
    data = folder / "clicks-data"
    generate(data, 64 * BATCHES["clicks"], BATCHES["clicks"], rows)
    os.environ["CLICKS_DATA"] = str(data)


def table(model: str, found: dict[str, list[Window]]) -> str:
    lines = []
    for name, windows in found.items():
        peers = zip(*(found[each] for each in found if each.startswith("ddp")), strict=True)
        best = [max(window.steps_per_s for window in of_round) for of_round in peers] or [float("nan")] * len(
            windows
        )
        cpu = [
            spread([w.cpu_ms.get(role, 0.0) for w in windows], 1)
            for role in ("trainers", "pservers", "others")
        ]
        cells: Sequence[str] = (
            model,
            TITLES[name],
            spread([BATCHES[model] * window.steps_per_s for window in windows], 0),
            spread([window.steps_per_s / rate for window, rate in zip(windows, best, strict=True)]),
            " + ".join(cpu),
            spread([window.foreign_cores for window in windows]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# ------------------------------------------------------------ whether all learn the same


def losses(names: Sequence[str], folder: Path) -> dict[str, float]:
    """Of the test set of deepfm after EPOCHS epochs."""
    return {name: _loss(name, folder / f"loss-{name}") for name in names}


def _loss(name: str, folder: Path) -> float:
    (ours, plain), batch = SCRIPTS["deepfm"], BATCHES["deepfm"]
    if name.startswith("ddp"):
        folder.mkdir()
        common = [
            "--batch",
            batch,
            "--ranks",
            TRAINERS,
            "--store",
            folder / "store",
            "--epochs",
            EPOCHS,
            "--tuned",
        ]
        commands = [
            [sys.executable, "-m", "benchmarks.torch_steps", plain, *common, "--rank", rank]
            for rank in range(TRAINERS)
        ]
        environment = {**os.environ, **({DENSE: "1"} if name == "ddp-dense" else {})}
        ranks = [
            subprocess.Popen(
                [str(each) for each in command], env=environment, stdout=subprocess.PIPE, text=True
            )
            for command in commands
        ]
        try:
            found = [rank.communicate(timeout=RUN_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        return float(json.loads(found[0])["loss"])
    options: Mapping[str, object] = (
        {"strategy": "collective"} if name == "ours" else {"pservers": int(name[-1])}
    )
    more = {
        "trainers": TRAINERS,
        "lanes": TRAINERS,
        "global-batch-size": batch,
        "epochs": EPOCHS,
        "data-dir": folder,
    }
    return float(json.loads(said(trireme_run(ours, {**options, **more}), {}, RUN_S))["metrics"]["loss"])


def loss_line(found: Mapping[str, float]) -> tuple[str, bool]:
    """And whether they are near each other: initial values and order are others, so the bits are not the
    same."""
    right = max(found.values()) - min(found.values()) <= MOST_DIFFERENCE
    return f"loss after {EPOCHS} epochs: " + ", ".join(
        f"{TITLES[name]} {value:.4f}" for name, value in found.items()
    ), right

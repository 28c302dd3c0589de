"""Row deepfm: samples a second of DeepFM on made-up clicks: ours with 2 trainers and a parameter server,
plain PyTorch in one process, Paddle with 2 trainers and a server. All are started once and stopped (SIGSTOP);
a round lets one after the other go on for a while, as in benchmarks.steps."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow.parquet as pq

from benchmarks.scripts.ctr_synthetic import generate
from benchmarks.step_rows import SETTLE_S, OurRow, TorchRow, send
from benchmarks.tables.lines import Figure, Line, figure
from benchmarks.tables.peers import PeerError, Process, paddle_environments

ROOT = Path(__file__).resolve().parents[2]
SCRIPT, PLAIN = (
    ROOT / "examples" / "deepfm" / "clicks.py",
    ROOT / "benchmarks" / "scripts" / "clicks_plain.py",
)
BATCH, TRAINERS = 4096, 2
OVER_PLAIN, OVER_PADDLE = 1.5, 2.0
START_S, LOOK_S, WARM_UP_STEPS = 120.0, 0.05, 5


@dataclass
class PaddleRow:
    """Each trainer takes whole batches: there is no global one, it is asynchronous."""

    samples: Path
    folder: Path
    _processes: list[Process] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        """Raises PeerError."""
        self.folder.mkdir()
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _start(self) -> None:
        for number, environment in enumerate(paddle_environments(TRAINERS)):
            more = {"SAMPLES": str(self.samples), "BATCH": str(BATCH), "STEPS": str(self._steps(number - 1))}
            cores = os.sched_getaffinity(0)
            self._processes.append(Process("paddle", "paddle_deepfm", environment | more, self.folder, cores))
            if number:  # the first trainer makes the dense parameters
                await self._trains(number - 1)

    async def _trains(self, trainer: int) -> None:
        deadline = time.monotonic() + START_S
        while len(self._lines(trainer)) < WARM_UP_STEPS:
            self._processes[1 + trainer].check()
            if time.monotonic() > deadline:
                raise PeerError(f"trainer {trainer} made no {WARM_UP_STEPS} steps in {START_S:g} s")
            await asyncio.sleep(LOOK_S)

    async def __aexit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.close()

    def pids(self) -> dict[str, list[int]]:
        return {"all": [process.pid for process in self._processes if process.lives]}

    def _steps(self, trainer: int) -> Path:
        return self.folder / f"steps-{trainer}"

    def _lines(self, trainer: int) -> list[tuple[float, float]]:
        path = self._steps(trainer)
        if not path.exists():
            return []
        found = [line.split() for line in path.read_text().split("\n")[:-1]]
        return [(float(when), float(loss)) for when, loss in found]

    async def rate(self, seconds: float) -> float:
        """Steps a second of all trainers. Raises PeerError if one makes no two in START_S."""
        begin = time.monotonic()
        await asyncio.sleep(seconds)
        while min(len(self._ends(trainer, begin)) for trainer in range(TRAINERS)) < 2:
            if time.monotonic() > begin + seconds + START_S:
                raise PeerError(f"a trainer made no two steps in {seconds + START_S:g} s")
            for process in self._processes:
                process.check()
            await asyncio.sleep(LOOK_S)
        ends = [self._ends(trainer, begin) for trainer in range(TRAINERS)]
        return sum((len(each) - 1) / (each[-1] - each[0]) for each in ends)

    def _ends(self, trainer: int, begin: float) -> list[float]:
        return [when for when, _ in self._lines(trainer) if when >= begin]

    def losses(self) -> tuple[float, float]:
        """Of the first steps, and of the last."""
        losses = [loss for _, loss in self._lines(0)]
        few = max(1, len(losses) // 10)
        return statistics.mean(losses[:few]), statistics.mean(losses[-few:])


@dataclass
class _Row:
    """Ours or torch's: steps a second."""

    row: Any

    async def rate(self, seconds: float) -> float:
        return (await self.row.window(seconds)).steps_per_s


def measure(rows: int, samples: int, rounds: int, seconds: float, peers: Sequence[str]) -> list[Line]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        print(f"tables: {samples:,} samples are made", file=sys.stderr)
        data = folder / "clicks"
        said = generate(data, samples, BATCH, rows)
        os.environ["CLICKS_DATA"] = str(data)  # for our members and plain PyTorch
        return asyncio.run(_measure(folder, data, said, rounds, seconds, peers))


async def _measure(
    folder: Path, data: Path, said: dict, rounds: int, seconds: float, peers: Sequence[str]
) -> list[Line]:
    rates: dict[str, list[float]] = {}
    missing: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        ways: dict[str, tuple[Any, Any]] = {}

        async def add(name: str, row: Any) -> None:
            await stack.enter_async_context(row)
            stack.callback(send, row, signal.SIGCONT)
            send(row, signal.SIGSTOP)
            ways[name] = (row, row if isinstance(row, PaddleRow) else _Row(row))

        await add("ours", OurRow(SCRIPT, BATCH, "sync", 1, folder / "ours"))
        if "torch" in peers:
            batches = max(1, said["samples"] // BATCH)
            for threads in sorted({1, min(TRAINERS, os.cpu_count() or 1)}):
                more = {"batches": batches, "threads": threads}
                await add(
                    f"torch, {threads}", TorchRow(PLAIN, BATCH, 1, True, folder / f"plain-{threads}", more)
                )
        if "Paddle" in peers:
            try:
                await add("Paddle", PaddleRow(_arrays(data, folder), folder / "paddle"))
            except PeerError as error:
                missing["Paddle"] = str(error)
        for number in range(rounds):
            for name in list(ways) if number % 2 == 0 else list(ways)[::-1]:
                row, measured = ways[name]
                send(row, signal.SIGCONT)
                await asyncio.sleep(SETTLE_S)
                try:
                    rates.setdefault(name, []).append(BATCH * await measured.rate(seconds))
                except PeerError as error:
                    missing[name] = str(error)
                    del ways[name]
                    continue
                send(row, signal.SIGSTOP)
                print(
                    f"tables: round {number + 1} of {rounds}: {name}: {rates[name][-1]:.0f} samples/s",
                    file=sys.stderr,
                )
        losses = ways["Paddle"][0].losses() if "Paddle" in ways else None
    return _lines(said, rates, missing, losses)


def _arrays(data: Path, folder: Path) -> Path:
    """The samples as .npy files, for a system without Parquet."""
    table = pq.read_table(sorted(data.glob("train-*.parquet")))
    for name in ("ids", "dense", "clicked"):
        column = table[name].combine_chunks()
        flat = column if name == "clicked" else column.flatten()
        np.save(folder / f"{name}.npy", flat.to_numpy().reshape(len(table), -1))
    return folder


def _lines(
    said: dict, rates: dict[str, list[float]], missing: dict[str, str], losses: tuple[float, float] | None
) -> list[Line]:
    found = {name: figure(values) for name, values in rates.items() if name not in missing}
    plain = max(
        (name for name in found if name.startswith("torch")), key=lambda name: found[name].median, default=""
    )
    peers: dict[str, Figure | str] = {"torch": found[plain]} if plain else {}
    peers |= {name: found[name] for name in ("Paddle",) if name in found} | missing
    all_of_torch = ", ".join(
        f"{name} threads {each}" for name, each in found.items() if name.startswith("torch")
    )
    note = (
        f"{said['total_rows']:,} rows of 16 in one table, {said['samples']:,} samples, batch {BATCH}; "
        "ours: 2 trainers, 1 parameter server, synchronous"
    )
    note += f"; {all_of_torch}, its samples in memory" if all_of_torch else ""
    if losses is not None:
        note += (
            f"; Paddle: 2 trainers with {BATCH} each, asynchronous, samples in memory, loss "
            f"{losses[0]:.3f} to {losses[1]:.3f}"
        )
    common = {"row": "deepfm", "unit": "samples/s", "ours": found["ours"], "peers": peers}
    lines = [
        Line(work=f"DeepFM, against {over}", goal=goal, over=over, **common)
        for over, goal in (("torch", OVER_PLAIN), ("Paddle", OVER_PADDLE))
        if over in peers
    ] or [Line(work="DeepFM", **common)]
    lines[-1].note = note
    return lines

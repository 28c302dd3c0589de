"""Rows memory and save: a large table with Adam at one parameter server; what its process takes, how fast a
checkpoint of it is written, what steps lose."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.baselines import Remote
from benchmarks.checkpoint_steps import PAST_CACHE, Part, plain_speed, plain_write
from benchmarks.dense_trireme import PserverProcess
from benchmarks.tables.lines import Line, exactly, figure
from benchmarks.tables.minibatches import Minibatches
from benchmarks.tables.ways import Server
from trireme_shared.checkpoints.writer import lower_priority

WARM_UP, QUIET, ROUNDS = 3, 15, 3
POOL, GRADIENTS = 64, 4  # minibatches that are made before steps begin: between two steps nothing happens
PART_S = 180.0
FLOATS = 3  # Adam: a value and two moments
SPEED_GOAL, SLOWER_GOAL = 0.6, 0.10


@dataclass(frozen=True)
class Round:
    """Seconds of a step without a write, of the step whose version is copied beyond that, and of the mean
    step beside the write. `bare`: a loop that only writes as many bytes, at the same priority in the same
    process, beside the same steps. `alone`: a part with nothing beside it."""

    step_s: float
    copied_s: float
    beside_s: float
    part: Part
    plain_mib_per_s: float
    bare: Part
    beside_bare_s: float
    alone: Part


class SavingProcess(PserverProcess):
    """Writes the checkpoints that steps ask for into `folder`, as the product does, and deletes each when it
    is written."""

    def save_into(self, folder: str) -> None:
        """Before its parameters are there, which take the schedule with them; version 0 is always written."""
        from trireme_shared.checkpoints.schedule import Schedule
        from trireme_shared.checkpoints.writer import Background

        self._done: list[Part] = []
        self.pserver.schedule = Schedule(every_steps=None, every_epochs=None, epochs=1 << 30)
        self._folder, self._offload = Path(folder), Background()
        self._saving = asyncio.run_coroutine_threadsafe(self._save(self._folder), self._loop)

    async def _save(self, folder: Path) -> None:
        from trireme_shared.checkpoints import writer

        offload, pserver = self._offload, self.pserver
        while True:
            await pserver.snapshot_ready.wait()
            pserver.snapshot_ready.clear()
            snapshot = pserver.store.take_snapshot() if pserver.store is not None else None
            if snapshot is None:
                continue
            path, begin = folder / f"part-{snapshot.version}", time.monotonic()
            finite = writer.parameters_of(pserver.store.layout)  # as jobs have it, unless they say otherwise
            size = (await offload(writer.write_part, str(path), dict, snapshot, finite)).bytes
            end = time.monotonic()
            snapshot.release()
            await offload(path.unlink)
            self._done.append(Part(begin, end, size, bare=False))

    def write_bare(self, size: int) -> None:
        """Begins to write so many bytes of nothing; `parts` then tells of it."""

        def write() -> None:
            lower_priority()
            begin, path = time.monotonic(), self._folder / "bare"
            plain_write(path, size, PAST_CACHE)
            self._done.append(Part(begin, time.monotonic(), size, bare=True))
            path.unlink()

        threading.Thread(target=write, daemon=True).start()

    def parts(self) -> list[Part]:
        """Those written since the last call. Raises what ended the writing."""
        if self._saving.done():
            self._saving.result()
        found, self._done = self._done, []
        return found


def measure(rows: int, dim: int, ids: int, rounds: int, wanted: Sequence[str]) -> list[Line]:
    data, lines = Minibatches(rows, dim, ids), []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        process = Remote(SavingProcess, 0, f"{folder}/socket-0")
        stack.callback(process.close)
        server = Server("shm", data, process.ask("start"), f"{folder}/socket")
        stack.callback(server.close)
        process.ask("save_into", str(folder))
        server.begin()
        server.steps(range(WARM_UP))
        process.ask("parts")
        peak, now = (process.ask(what) / data.rows for what in ("memory", "resident"))
        if "memory" in wanted:
            goal = 1.35 * (dim * FLOATS * 4 + 16)
            note = f"{data.rows:,} rows of {dim}; at the highest while rows were made {peak:.0f}"
            lines.append(
                Line(
                    "memory",
                    "memory a row, Adam",
                    "bytes",
                    exactly(now),
                    goal=goal,
                    higher=False,
                    note=note,
                )
            )
        if "save" in wanted:
            step = _Steps(server, data)
            try:
                found = [_round(step, process, folder, number) for number in range(min(rounds, ROUNDS))]
            except TimeoutError as error:
                lines.append(
                    Line(
                        "save", f"save {data.rows:,} rows", "of the disk's speed", str(error), goal=SPEED_GOAL
                    )
                )
            else:
                lines += _lines(data, found)
    return lines


def _round(step: _Steps, process: Remote, folder: Path, number: int) -> Round:
    """Steps without a write, the one whose version is copied, and those beside the write."""
    step()  # the first after something else
    usual = statistics.median(step() for _ in range(QUIET))
    copied = step(asks=True)
    part, beside = _until_written(process, step)
    process.ask("write_bare", part.size)
    bare, beside_bare = _until_written(process, step)
    step(asks=True)
    alone, _ = _until_written(process, lambda: time.sleep(0.01))
    found = Round(
        step_s=usual,
        copied_s=copied - usual,
        beside_s=statistics.mean(beside) if beside else usual,
        part=part,
        plain_mib_per_s=plain_speed(folder, part.size),
        bare=bare,
        beside_bare_s=statistics.mean(beside_bare) if beside_bare else usual,
        alone=alone,
    )
    print(f"tables: saved {number + 1} times, {found.part.mib_per_s:.0f} MiB/s", file=sys.stderr)
    return found


def _until_written(process: Remote, step: Callable[[], float | None]) -> tuple[Part, list[float]]:
    """What `step` answers meanwhile. Raises TimeoutError."""
    beside, deadline = [], time.monotonic() + PART_S
    while not (parts := process.ask("parts")):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no part within {PART_S:g} s")
        beside.append(step())
    return parts[0], beside


class _Steps:
    """One after the other, round and round over POOL minibatches; seconds of each."""

    def __init__(self, server: Server, data: Minibatches) -> None:
        self._server = server
        gradients = [data.gradients(number) for number in range(GRADIENTS)]
        given = [(data.of(WARM_UP + number), gradients[number % GRADIENTS]) for number in range(POOL)]
        self._given = itertools.cycle(given)

    def __call__(self, *, asks: bool = False) -> float:
        ids, gradients = next(self._given)
        begin = time.monotonic()
        self._server.step(ids, gradients, asks=asks)
        return time.monotonic() - begin


def _lines(data: Minibatches, rounds: Sequence[Round]) -> list[Line]:
    size = rounds[0].part.size / 2**20
    work = f"save {data.rows:,} rows"
    speeds = figure([one.part.mib_per_s / one.plain_mib_per_s for one in rounds])
    disk = figure([one.plain_mib_per_s for one in rounds])
    copied = figure([1e3 * one.copied_s for one in rounds])
    usual = figure([1e3 * one.step_s for one in rounds])
    slower = figure([100 * (one.beside_s / one.step_s - 1) for one in rounds])
    bare, alone = (
        figure([one.mib_per_s for one in some])
        for some in zip(*((r.bare, r.alone) for r in rounds), strict=True)
    )
    slower_bare = figure([100 * (one.beside_bare_s / one.step_s - 1) for one in rounds])
    own = figure([one.part.mib_per_s for one in rounds])
    note = (
        f"{size:.0f} MiB beside steps: {own} MiB/s; a plain write of as many bytes with nothing beside "
        f"it: {disk}"
    )
    note += f"; a bare loop of writes beside the same steps: {bare}; a part with nothing beside it: {alone}"
    lost = (
        f"of {usual} ms; beside the bare loop {slower_bare} %; the step whose version is copied takes "
        f"{copied} ms more"
    )
    return [
        Line("save", work, "of the disk's speed", speeds, goal=SPEED_GOAL, note=note),
        Line(
            "save",
            f"{work}: steps meanwhile",
            "% slower",
            slower,
            goal=100 * SLOWER_GOAL,
            higher=False,
            note=lost,
        ),
    ]

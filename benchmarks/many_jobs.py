"""Three jobs with priorities on one pool: python -m benchmarks.many_jobs [--trainers 6] [--pservers 3]
[--epochs 10] [--markdown]

`trireme up` starts the pool, `trireme submit` the jobs of examples/digits: `low` (priority 20) first,
`middle` (50) when `low` trains, `high` (90, at least 3 trainers) when both do. Shown: who had how many
running trainers at which time, how long each job waited from its arrival for its least number of trainers,
and whether each job's exported model has every bit of `trireme run` alone.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from trireme.cli.targets import cluster_target
from trireme.view.job_address import client_of
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.errors import PeerError, TriremeError

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "digits" / "digits.py"
TRIREME = [sys.executable, "-m", "trireme"]
LOOK_S = 0.2
START_S, END_S = 120.0, 900.0


@dataclass
class Wanted:
    """One job: what `trireme submit` gets, and what was seen of it. Times in seconds since the first
    submission."""

    name: str
    priority: int
    least: int
    epochs: int
    arrived_s: float | None = None
    served_s: float | None = None
    ended_s: float | None = None
    state: str = ""
    changes: list[tuple[float, int]] = field(default_factory=list)

    def settings(self) -> list[str]:
        return [
            "--epochs",
            str(self.epochs),
            "--pservers",
            "1",
            "--lanes",
            "8",
            "--seed",
            str(self.priority),
            "--no-check",
        ]

    def submission(self) -> list[str]:
        return [
            "--name",
            self.name,
            "--priority",
            str(self.priority),
            "--min-trainers",
            str(self.least),
            *self.settings(),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trainers", type=int, default=6)
    parser.add_argument("--pservers", type=int, default=3)
    parser.add_argument(
        "--epochs", type=int, default=10, help="of the job that comes last; the others train longer"
    )
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    telemetry.configure(level="ERROR", json=False)
    jobs = [
        Wanted("low", 20, 1, 3 * options.epochs),
        Wanted("middle", 50, 1, 2 * options.epochs),
        Wanted("high", 90, 3, options.epochs),
    ]
    with tempfile.TemporaryDirectory(prefix="trireme-many-jobs-") as folder:
        place = Path(folder)
        up = start_pool(options, place)
        try:
            asyncio.run(watch(jobs, place))
        finally:
            up.terminate()
            up.wait(120)
        same = {job.name: same_bits(job, place) for job in jobs}
    show(jobs, same, markdown=options.markdown)
    if not all(same.values()) or any(job.state != "COMPLETED" for job in jobs):
        sys.exit(1)


def start_pool(options: argparse.Namespace, folder: Path) -> subprocess.Popen[bytes]:
    counts = ["--trainers", str(options.trainers), "--pservers", str(options.pservers)]
    with (folder / "up.log").open("wb") as log:
        command = [*TRIREME, "up", *counts, "--data-dir", str(folder)]
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)


async def watch(jobs: list[Wanted], folder: Path) -> None:
    """Submit one after the other and look until all have ended. Raises TimeoutError."""
    async with asyncio.timeout(START_S + END_S):
        target = await the_cluster(folder)
        async with client_of(target.address, target.token) as cluster:
            begin, waiting = clock.monotonic(), list(jobs)
            while any(job.ended_s is None for job in jobs):
                now = clock.monotonic() - begin
                seen = {each.job: each.model_dump(mode="json") async for each in cluster.list_jobs()}
                for job in jobs:
                    if job.name in seen:
                        note(job, seen[job.name], now)
                earlier = jobs[: len(jobs) - len(waiting)]
                if waiting and all(job.served_s is not None and now - job.served_s > 3 for job in earlier):
                    job = waiting.pop(0)
                    await submit(job, folder)
                await asyncio.sleep(LOOK_S)


async def the_cluster(folder: Path) -> Any:
    while True:
        try:
            target = cluster_target(folder, None)
            async with client_of(target.address, target.token) as cluster:
                members = [member async for member in cluster.list_pool_members()]
            if members:
                return target
        except (PeerError, TriremeError):
            pass
        await asyncio.sleep(LOOK_S)


async def submit(job: Wanted, folder: Path) -> None:
    command = [*TRIREME, "submit", str(SCRIPT), *job.submission(), "--data-dir", str(folder)]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    _, errors = await process.communicate()
    if process.returncode:
        sys.exit(errors.decode())


def note(job: Wanted, shown: dict[str, Any], now: float) -> None:
    running = shown["members"]["trainers"]
    if not job.changes or job.changes[-1][1] != running:
        job.changes.append((now, running))
    job.arrived_s = now if job.arrived_s is None else job.arrived_s
    if job.served_s is None and running >= job.least:
        job.served_s = now
    if job.ended_s is None and shown["standing"] in ("COMPLETED", "FAILED", "CANCELLED"):
        job.ended_s, job.state = now, shown["standing"]
        job.served_s = now if job.served_s is None else job.served_s  # between two looks


def same_bits(job: Wanted, folder: Path) -> bool:
    """Whether the exported model is that of `trireme run` with one trainer."""
    alone = folder / "alone"
    command = [*TRIREME, "run", str(SCRIPT), "--job", job.name, "--trainers", "1", *job.settings()]
    done = subprocess.run([*command, "--data-dir", str(alone)], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        sys.exit(done.stderr.decode())
    one = next(alone.rglob(f"{job.name}/**/model.safetensors"))
    others = [
        path
        for path in folder.rglob("model.safetensors")
        if alone not in path.parents and job.name in path.parts
    ]
    ours, theirs = load_file(one), load_file(others[0])
    return ours.keys() == theirs.keys() and all(bool((ours[name] == theirs[name]).all()) for name in ours)


def show(jobs: list[Wanted], same: dict[str, bool], *, markdown: bool) -> None:
    times = sorted({round(at, 1) for job in jobs for at, _ in job.changes})
    head = ["seconds", *(f"{job.name} ({job.priority})" for job in jobs)]
    rows = [[f"{at:.1f}", *(str(at_time(job, at)) for job in jobs)] for at in times]
    end = "|" if markdown else ""
    for row in [head, *([["---"] * len(head)] if markdown else []), *rows]:
        print(end + end.join(f" {cell:>12} " for cell in row) + end)
    for job in jobs:
        arrived, served = job.arrived_s or 0.0, job.served_s or float("nan")
        bits = "same bits as alone" if same[job.name] else "OTHER BITS than alone"
        print(
            f"{job.name}: {job.least} trainers {served - arrived:.1f} s after its arrival, "
            f"{job.state}, {bits}"
        )


def at_time(job: Wanted, at: float) -> int:
    return next((count for since, count in reversed(job.changes) if round(since, 1) <= at), 0)


if __name__ == "__main__":
    main()

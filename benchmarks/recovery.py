"""How long a job needs to get over a death: python -m benchmarks.recovery [--faults 10] [--markdown | --json]

examples/charlm as `trireme run` starts it (2 trainers, 2 parameter servers, a standby master); one process
after the other gets SIGKILL, as by `trireme chaos kill`, whose receipts are what is shown. In a second run
there is a spare parameter server. The row of a parameter server without one is split by what launcher and
parameter server logged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measurements import clean_environment
from trireme.cli import chaos
from trireme.cli.chaos import JobProbe, Receipt
from trireme.view.child_events import read_events
from trireme_shared.platform.runtime import telemetry
from trireme_shared.platform.runtime.clock import seconds_between

ROOT = Path(__file__).parents[1]
JOB = "recovery"
SETTINGS = {"global_batch_size": 16, "records_per_task": 16, "checkpoint_every_steps": 20}
# from the return of the last one that died to the next death; a spare one is seen by nobody
CALM_S, SPARE_S = 1.0, 6.0
KINDS = ("trainer", "master", "pserver", "spare")
START_S = 120.0


@dataclass(frozen=True)
class Measured:
    what: str
    target_s: float | None
    seconds: list[float]

    def document(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "target_s": self.target_s,
            "faults": len(self.seconds),
            "median_s": round(statistics.median(self.seconds), 3),
            "min_s": min(self.seconds),
            "max_s": max(self.seconds),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=10, help="of each kind")
    parser.add_argument(
        "--only", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help=", ".join(KINDS)
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--markdown", action="store_true")
    shape.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    telemetry.configure(level="ERROR", json=False)
    with tempfile.TemporaryDirectory(prefix="trireme-recovery-") as folder:
        rows = asyncio.run(measure(Path(folder), arguments.faults, arguments.only))
    if arguments.json:
        print(json.dumps([row.document() for row in rows]))
        return
    print("| died (SIGKILL), until | target | median | min | max | deaths |\n|---|---|---|---|---|---|")
    for row in rows:
        one, target = row.document(), "" if row.target_s is None else f"< {row.target_s:g} s"
        print(
            f"| {row.what} | {target} | {one['median_s']:.2f} s | {one['min_s']:.2f} s | "
            f"{one['max_s']:.2f} s | {one['faults']} |"
        )


async def measure(folder: Path, faults: int, kinds: Sequence[str]) -> list[Measured]:
    rows = []
    if set(kinds) - {"spare"}:
        with running(folder / "one", spares=0) as run:
            await first_step(run)
            if "trainer" in kinds:
                receipts = [await killed(run, f"trainer-{number % 2}") for number in range(faults)]
                rows.append(Measured("a trainer: next committed step", 1.0, steps(receipts)))
            if "master" in kinds:
                receipts = [await killed(run, await leader(run)) for _ in range(faults)]
                rows.append(
                    Measured(
                        "the leading master, a standby waits: next committed step", None, steps(receipts)
                    )
                )
                rows.append(
                    Measured("the leading master, a standby waits: next task given out", 2.0, tasks(receipts))
                )
            if "pserver" in kinds:
                receipts = [await killed(run, f"pserver-{number % 2}") for number in range(faults)]
                rows.append(Measured("a parameter server: next committed step", 4.0, steps(receipts)))
                splits = [split(run, receipt) for receipt in receipts]
                rows += [
                    Measured(f"&nbsp; of these: {name}", None, [parts[name] for parts in splits])
                    for name in splits[0]
                ]
    if "spare" in kinds:
        with running(folder / "two", spares=1) as run:
            await first_step(run)
            # in this order each one has a place again when its turn comes; the first may have been the spare
            # one
            receipts = [await killed(run, f"pserver-{number % 3}", SPARE_S) for number in range(faults + 1)]
            lost = [receipt for receipt in receipts if receipt.rolled_back_to is not None]
            rows.append(
                Measured("a parameter server, a spare one waits: next committed step", 4.0, steps(lost))
            )
    return rows


def steps(receipts: Sequence[Receipt]) -> list[float]:
    return [receipt.next_step_s for receipt in receipts if receipt.next_step_s is not None]


def tasks(receipts: Sequence[Receipt]) -> list[float]:
    return [receipt.next_task_s for receipt in receipts if receipt.next_task_s is not None]


async def killed(run: Path, name: str, calm_s: float = CALM_S) -> Receipt:
    """Once everybody who died before is there again."""
    deadline = time.monotonic() + START_S
    async with JobProbe(run) as probe:
        while await probe.missing() and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
    await asyncio.sleep(calm_s)
    receipt = await chaos.kill_one(run, name)
    assert receipt.records_lost == 0, receipt
    return receipt


async def leader(run: Path) -> str:
    """`master-1`"""
    async with JobProbe(run) as probe:
        return (await probe.leader()).rpartition("-")[0]


def split(run: Path, receipt: Receipt) -> dict[str, float]:
    """Seconds of a parameter server's recovery, by what launcher and it logged; what is left is everybody
    else's."""
    events = [line for line in read_events(run) if line["child"] == receipt.killed]
    died = next(line["time"] for line in events if (line["pid"], line["what"]) == (receipt.pid, "died"))
    restarted = next(line["time"] for line in events if line["what"] == "restarted" and line["time"] > died)
    lines = [
        json.loads(line)
        for line in (run / "logs" / f"{receipt.killed}.log").read_text().splitlines()
        if line[0] == "{"
    ]
    at = {
        line["event"]: line["timestamp"]
        for line in reversed(lines)
        if seconds_between(died, line["timestamp"]) > 0
    }
    waiting, starting = seconds_between(died, restarted), seconds_between(restarted, at["index_claimed"])
    loading = seconds_between(at["rolling_back"], at["restored"])
    noticing, whole = receipt.noticed_s or 0.0, receipt.next_step_s or 0.0
    return {
        "noticing": noticing,
        "waiting before the restart, and a fork": round(waiting, 3),
        "until the new process has its place": round(starting, 3),
        "loading the checkpoint": round(loading, 3),
        "the rest": round(whole - noticing - waiting - starting - loading, 3),
    }


@contextmanager
def running(folder: Path, spares: int) -> Iterator[Path]:
    """`trireme run` on examples/charlm; the job's folder. Everything is stopped at the end."""
    folder.mkdir(parents=True)
    flags = {"job": JOB, "data-dir": folder, "epochs": 1000, "standbys": 1, "spare-pservers": spares}
    command = [
        sys.executable,
        "-m",
        "trireme",
        "run",
        ROOT / "examples" / "charlm" / "charlm.py",
        "--no-check",
    ]
    command += [
        word
        for name, value in (flags | {"trainers": 2, "pservers": 2}).items()
        for word in (f"--{name}", value)
    ]
    command += [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    environment = clean_environment() | {"CHARLM_DATA": str(folder / "text")}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(list(map(str, command)), env=environment, cwd=ROOT, stdout=log, stderr=log)
        try:
            yield folder / JOB
        finally:
            for number in (signal.SIGINT, signal.SIGINT):
                process.send_signal(number)
                time.sleep(1)
            process.wait()


async def first_step(run: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if (run / "run.json").exists():
            async with JobProbe(run) as probe:
                while time.monotonic() < deadline:
                    if (await probe.versions() or (0, 0))[0] > 0:
                        return
                    await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)
    raise TimeoutError(f"no step after {START_S:g} s; see {run / 'logs'}")


if __name__ == "__main__":
    main()

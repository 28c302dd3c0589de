"""A benchmark of an older commit and of this tree, in turn: python -m benchmarks.compare REV [--turns 5] --
dense --rows tcp,shm

Each turn runs `python -m benchmarks.NAME ARGUMENTS --json` once in a worktree of REV and once here, the order
swapped every turn, so both see the same machine. A figure's ratio is taken turn by turn, this tree's by
REV's; the table shows the median of the ratios and their quartiles. Exit code 1 if a median is worse than
--limit (default: nothing is judged).

Of `collective` the part `jobs` is compared. A REV from before a benchmark's arguments or JSON fields were
what they are now cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.spread import quartiles

ROOT = Path(__file__).parents[1]
LOWER, HIGHER = "lower is better", "higher is better"
Figures = dict[str, tuple[float, str]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rev", help="the older commit")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--limit", type=float, help="how much slower a median may be: 0.05 is 5 %%")
    parser.add_argument("benchmark", choices=FIGURES)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the benchmark")
    given = parser.parse_args()
    turns: list[tuple[Figures, Figures]] = []
    # so that the worktree is removed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="trireme-compare-") as folder:
        older = Path(folder) / "older"
        git = ["git", "-C", str(ROOT), "worktree"]
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # half a worktree could not be removed
        subprocess.run([*git, "add", "--quiet", "--detach", str(older), given.rev], check=True)
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            for turn in range(given.turns):
                trees = (older, ROOT) if turn % 2 == 0 else (ROOT, older)
                found = {tree: measured(tree, given.benchmark, given.arguments) for tree in trees}
                turns.append((found[older], found[ROOT]))
                print(f"turn {turn + 1} of {given.turns} is done", file=sys.stderr, flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(older)], check=True)
    return report(turns, given.rev, given.limit)


def environment_of(tree: Path) -> dict[str, str]:
    """Where every package of Trireme comes from `tree`, in the benchmark and in the members that it starts:
    without it those that lie in `shared/` come from the tree that is installed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "shared")])}


def measured(tree: Path, name: str, arguments: list[str]) -> Figures:
    """One run there. Raises SystemExit with what the benchmark printed if it fails."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    shows_json = name != "collective"
    if shows_json:
        command.append("--json")
    done = subprocess.run(
        command, cwd=tree, env=environment_of(tree), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(
            f"{' '.join(command)} in {tree} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
    return dict(FIGURES[name](json.loads(done.stdout) if shows_json else done.stdout))


def report(turns: list[tuple[Figures, Figures]], rev: str, limit: float | None) -> int:
    print(f"| figure | {rev} | this tree | this tree / {rev}: median (quartiles) | |\n|---|---|---|---|---|")
    worst = 0.0
    for figure, (_, better) in turns[0][0].items():
        before = [older[figure][0] for older, _ in turns]
        now = [newer[figure][0] for _, newer in turns]
        ratios = [b / a for a, b in zip(before, now, strict=True)]
        low, middle, high = quartiles(ratios)
        slower = middle - 1 if better == LOWER else 1 / middle - 1
        worst = max(worst, slower)
        cells = f"{statistics.median(before):.3g} | {statistics.median(now):.3g}"
        print(f"| {figure} | {cells} | {middle:.3f} ({low:.3f} to {high:.3f}) | {better} |")
    return 1 if limit is not None and worst > limit else 0


def of_dense(found: Any) -> Iterator[tuple[str, tuple[float, str]]]:
    for row in found["rows"]:
        yield f"{row['row']} {row['mib']} MiB {row['optimizer']}, ms", (row["median_ms"], LOWER)


def of_steps(found: Any) -> Iterator[tuple[str, tuple[float, str]]]:
    """Processor time of a step tells less of what else the machine did meanwhile than steps/s do."""
    for row in found["rows"]:
        rates = [window["steps_per_s"] for window in row["windows"]]
        yield f"{row['model']} {row['row']}, steps/s", (statistics.median(rates), HIGHER)
        cpu_ms = [sum(window["cpu_ms"].values()) for window in row["windows"]]
        yield f"{row['model']} {row['row']}, CPU ms of a step", (statistics.median(cpu_ms), LOWER)


def of_dispatch(found: Any) -> Iterator[tuple[str, tuple[float, str]]]:
    for row in found["rows"]:
        name = (
            f"{row['tasks']:.0e} tasks, {row['clients']} {row['client']} clients, {row['requests']} "
            "requests a pair"
        )
        yield f"{name}, pairs/s", (row["pairs_per_s"], HIGHER)
        yield f"{name}, master's CPU ms of a pair", (row["cpu_ms"]["master"], LOWER)
        if row["failover_s"] is not None:
            yield f"{row['tasks']:.0e} tasks, failover, s", (row["failover_s"], LOWER)


def of_recovery(found: Any) -> Iterator[tuple[str, tuple[float, str]]]:
    for row in found:
        yield f"{row['what']}, s", (row["median_s"], LOWER)


def of_table(found: Any) -> Iterator[tuple[str, tuple[float, str]]]:
    for line in found["lines"]:
        if isinstance(line["ours"], dict):
            better = LOWER if line["unit"] in ("ms", "bytes", "% slower") else HIGHER
            yield f"{line['row']}, {line['work']}, {line['unit']}", (line["ours"]["median"], better)
            for peer, ratio in line["ratios"].items():
                if ratio:
                    yield f"{line['row']}, {line['work']}, times {peer}", (ratio, HIGHER)


def of_collective(markdown: str) -> Iterator[tuple[str, tuple[float, str]]]:
    """The steps/s of its part `jobs`, which it prints as a table alone: a cell is `7.1 (6.9 to 7.3)`."""
    for line in markdown.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 7 and cells[1].isdigit():
            model, members, what, rate = cells[:4]
            yield f"{model}, {members} members, {what}, steps/s", (float(rate.split()[0]), HIGHER)


FIGURES = {
    "dense": of_dense,
    "steps": of_steps,
    "dispatch": of_dispatch,
    "recovery": of_recovery,
    "table": of_table,
    "collective": of_collective,
}


if __name__ == "__main__":
    raise SystemExit(main())

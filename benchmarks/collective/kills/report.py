"""Kills and freezes as tables."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.collective.exchange import progress
from benchmarks.collective.kills import gloo, job
from trainer_agent.script import user_module

SPARES = 3
KILL_GOAL_S, FREEZE_GOAL_S = 1.0, job.LEASE_S + 0.5
SECONDS = (
    "| one of 4 gets | times | median | 90 % | 99 % | longest | goal | killed before that | "
    "disagreed | equal at the end | steps | digests | seconds |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Counts:
    kills: int
    freezes: int
    instants: int
    gloo_kills: int
    within_s: float  # each row, without the job that is left alone


def report(counts: Counts, seed: int, folder: Path) -> bool:
    """Prints; whether no trainer had another version than a job left alone. A count of 0: that row is left
    out."""
    print(f"\n{SECONDS}")
    right = True
    # Gloo's processes are forked, so before anything has threads
    disagreed = gloo.disagreements(counts.gloo_kills, folder / "gloo", seed) if counts.gloo_kills else 0
    user_module.load(job.SCRIPT).dataset()  # writes the data, once
    rows = (
        (f"SIGKILL (at the 99th percentile {KILL_GOAL_S:g} s)", counts.kills, KILL_GOAL_S, False, 0),
        (f"SIGSTOP, lease {job.LEASE_S:g} s", counts.freezes, FREEZE_GOAL_S, True, 0),
        (f"SIGKILL, {SPARES} spares, the next one soon", counts.instants, math.nan, False, SPARES),
    )
    for place, (what, count, goal, frozen, spares) in enumerate(rows):
        if count:
            options = {"frozen": frozen, "spares": spares, "seed": seed, "within_s": counts.within_s}
            found = asyncio.run(job.measure(count, folder / f"kills-{place}", **options))
            progress(
                f"seconds: {' '.join('never' if each is None else f'{each:.3f}' for each in found.seconds)}"
            )
            print(row(what, goal, found), *filter(None, [found.ended]), sep="\n", flush=True)
            right = right and found.right
    if counts.gloo_kills:
        share = disagreed / counts.gloo_kills
        print(
            f"plain Gloo, 4 processes: after {disagreed} of {counts.gloo_kills} kills "
            f"({share:.0%}) survivors disagreed"
        )
    return right


def row(what: str, goal: float, found: job.Found) -> str:
    seconds = sorted(each for each in found.seconds if each is not None)
    shares = [f"{percentile(seconds, share):.2f} s" if seconds else "" for share in (50, 90, 99, 100)]
    goals = "" if math.isnan(goal) else f"{goal:g} s"
    equal = f"{found.equal} of {job.MEMBERS}"
    counted = (
        found.seconds.count(None),
        found.disagreed,
        equal,
        found.versions,
        found.digests,
        f"{found.took:.0f}",
    )
    return (
        f"| {what} | {len(found.seconds)} | {' | '.join(shares)} | {goals} | "
        f"{' | '.join(map(str, counted))} |"
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The lowest of `ordered` that `share` percent of them do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)]

"""Steady state: one exchange of float32 gradients after the other, ours and Gloo's, rounds of all rows
interleaved.

All members of a row are told a moment at which they begin; a round ends when the last of them has the whole
result. Gloo gives sums, ours means.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.baselines import Remote
from benchmarks.collective.direct import DirectMember
from benchmarks.collective.floor import FloorMember
from benchmarks.collective.gloo import GlooMember
from benchmarks.spread import spread

TITLES = {
    "bucketed": "Gloo all_reduce, all buckets in flight together",
    "whole": "Gloo all_reduce, one operation",
    "canonical": "canonical reduction over Gloo",
    "native": "native exchange, canonical",
    "native-fast": "native exchange, fast",
    "tcp": "direct, TCP",
    "unix": "direct, UNIX sockets",
    "shm": "direct, shared memory",
    "floor": "plain TCP sockets, as many bytes, nothing computed",
}
GLOO = ("bucketed", "whole", "canonical", "native", "native-fast")
GOALS = {"tcp": 0.6, "shm": 0.35}
WARM_UP = 3
SOON_S = 0.01  # until a round begins: every member has heard of it by then


@dataclass
class Row:
    """`took` in seconds, round by round; `cpu`: seconds of processor, of all members together. `wrong`:
    elements of the last result."""

    name: str
    members: list[Remote]
    took: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    wrong: int = 0

    def round(self) -> None:
        before = sum(member.cpu() for member in self.members)
        at = time.monotonic() + SOON_S * len(self.members)
        more = (self.name,) if self.name in GLOO else ()
        for member in self.members:
            member.begin("round", at, *more)
        self.took.append(max(member.end() for member in self.members) - at)
        self.cpu.append(sum(member.cpu() for member in self.members) - before)


def measure(
    names: Sequence[str], members: int, mib: int, buckets: int, block_kib: int, rounds: int, folder: Path
) -> list[Row]:
    with ExitStack() as stack:
        rows = [Row(name, []) for name in names]
        gloo: list[Remote] = []
        for row in rows:
            if row.name in GLOO:
                gloo = row.members = gloo or _gloo(members, mib, buckets, folder / f"gloo-{members}", stack)
            elif row.name == "floor":
                row.members = _floor(members, mib, stack)
            else:
                row.members = _direct(row.name, members, mib, block_kib, folder, stack)
        for number in range(WARM_UP + rounds):
            for row in rows if number % 2 else reversed(rows):
                row.round()
            if number == WARM_UP - 1:
                for row in rows:
                    row.took.clear()
                    row.cpu.clear()
        for row in rows:
            row.round()
            more = (row.name,) if row.name in GLOO else ()
            row.wrong = sum(member.ask("check", *more) for member in row.members)
            row.took.pop()
            row.cpu.pop()
        return rows


def _all(members: Sequence[Remote], name: str, *arguments: object) -> list:
    for member in members:
        member.begin(name, *arguments)
    return [member.end() for member in members]


def _direct(kind: str, count: int, mib: int, block_kib: int, folder: Path, stack: ExitStack) -> list[Remote]:
    sockets = [
        "" if kind == "tcp" else str(folder / f"{kind}-{count}-{place}.sock") for place in range(count)
    ]
    members = [Remote(DirectMember, kind, place, count, sockets[place]) for place in range(count)]
    for member in members:
        stack.callback(member.close)
    ports = _all(members, "serve")
    _all(members, "begin", mib, block_kib, ports, sockets)
    _all(members, "formed")
    return members


def _gloo(count: int, mib: int, buckets: int, store: Path, stack: ExitStack) -> list[Remote]:
    members = [Remote(GlooMember, place, count, str(store)) for place in range(count)]
    for member in members:
        stack.callback(member.close)
    _all(members, "begin", mib, buckets)
    return members


def _floor(count: int, mib: int, stack: ExitStack) -> list[Remote]:
    members = [Remote(FloorMember, place, count) for place in range(count)]
    for member in members:
        stack.callback(member.close)
    _all(members, "begin", mib, _all(members, "serve"))
    return members


HEAD = (
    "| members | what | ms | CPU ms, all members | x Gloo, in flight together | x Gloo, one operation "
    "| right |\n|---|---|---|---|---|---|---|"
)


def table(members: int, rows: Sequence[Row]) -> str:
    times = {row.name: row.took for row in rows}
    lines = []
    for row in rows:
        ratios = [
            spread([a / b for a, b in zip(row.took, times[base], strict=True)]) if base in times else ""
            for base in ("bucketed", "whole")
        ]
        ms, cpu = (spread([1000 * each for each in values], 1) for values in (row.took, row.cpu))
        right = "yes" if not row.wrong else f"NO: {row.wrong} elements"
        lines.append(f"| {members} | {TITLES[row.name]} | {ms} | {cpu} | {' | '.join(ratios)} | {right} |")
    return "\n".join(lines)


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

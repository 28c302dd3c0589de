"""Dense parameters: push the gradient, step the optimizer, pull the parameters. All rows in one run, rounds interleaved.

    python -m benchmarks.dense [--mib 1,16,64] [--rounds 15] [--optimizers SGD,Adam] [--rows floor,plain,...] [--markdown | --json]

Times vary with the machine; the ratios within one run are what counts. `net` is what /proc/net/dev saw on the loopback
device per round (bytes received, so 64 MiB there and back show as 134 MB); a UNIX socket shows none.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.ours import Ours
from benchmarks.rivals import Floor, Gloo, Rpc

TITLES = {
    "floor": "floor: raw duplex sockets, threads, TCP",
    "plain": "ours, plain requests, TCP",
    "tcp": "ours, stream, TCP",
    "unix": "ours, stream, UNIX socket",
    "rpc-tcp": "torch RPC, TCP",
    "rpc": "torch RPC, default",
    "tcp2": "ours, stream, TCP, 2 trainers",
    "unix2": "ours, stream, UNIX socket, 2 trainers",
    "gloo": "gloo all-reduce + local step, 2 ranks",
}
BASES: tuple[str, ...] = ("floor", "rpc-tcp", "rpc", "gloo", "tcp")
WARM_UP = 3


class Contender(Protocol):
    """Anything that can be asked to do rounds; `round` gives seconds, `check` whether the numbers came out right."""

    def setup(self, mib: int, optimizer: str) -> None: ...
    def round(self) -> float: ...
    def check(self) -> bool: ...
    def close(self) -> None: ...


@dataclass
class Row:
    row: str
    mib: int
    optimizer: str
    median_ms: float
    lowest_ms: float
    quartiles_ms: tuple[float, float]
    net_mb: float
    right: bool
    ratios: dict[str, float]


def makers(directory: str, block_kib: int) -> dict[str, Callable[[], Contender]]:
    return {
        "floor": Floor,
        "plain": lambda: Ours("plain", 1, "", block_kib),
        "tcp": lambda: Ours("tcp", 1, "", block_kib),
        "unix": lambda: Ours("unix", 1, f"{directory}/one.sock", block_kib),
        "rpc-tcp": lambda: Rpc(tcp_only=True),
        "rpc": lambda: Rpc(tcp_only=False),
        "tcp2": lambda: Ours("tcp", 2, "", block_kib),
        "unix2": lambda: Ours("unix", 2, f"{directory}/two.sock", block_kib),
        "gloo": Gloo,
    }


def loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    return 0


def measure(contenders: dict[str, Contender], mib: int, optimizer: str, rounds: int) -> list[Row]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    moved: dict[str, list[int]] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender.setup(mib, optimizer)
    for number in range(WARM_UP + rounds):
        for name, contender in contenders.items():
            before = loopback_bytes()
            took = contender.round()
            if number >= WARM_UP:
                times[name].append(took)
                moved[name].append(loopback_bytes() - before)
    medians = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    rows = []
    for name, contender in contenders.items():
        low, _, high = statistics.quantiles([value * 1e3 for value in times[name]], n=4)
        ratios = {
            other: medians[name] / medians[other]
            for other in ("floor", "rpc-tcp", "rpc", "gloo", "tcp")
            if other in medians
        }
        net = statistics.median(moved[name]) / 1e6
        rows.append(
            Row(
                name, mib, optimizer, medians[name], min(times[name]) * 1e3, (low, high), net, contender.check(), ratios
            )
        )
    return rows


HEAD = (
    "| what | MiB | optimizer | median ms | quartiles | best | net MB | x floor | x RPC TCP | x RPC | x gloo | right |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def table(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        ratios = " | ".join(
            f"{row.ratios[k]:.2f}" if k in row.ratios else "" for k in ("floor", "rpc-tcp", "rpc", "gloo")
        )
        low, high = row.quartiles_ms
        lines.append(
            f"| {TITLES[row.row]} | {row.mib} | {row.optimizer} | {row.median_ms:.1f} | {low:.1f}-{high:.1f} | "
            f"{row.lowest_ms:.1f} | {row.net_mb:.0f} | {ratios} | {'yes' if row.right else 'NO'} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", default="1,16,64")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--optimizers", default="SGD,Adam")
    parser.add_argument("--rows", default=",".join(TITLES))
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--markdown", action="store_true", help="the default")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        contenders: dict[str, Contender] = {}
        for name, make in makers(directory, given.block_kib).items():
            if name in given.rows.split(","):
                contenders[name] = make()
                stack.callback(contenders[name].close)
        for optimizer in given.optimizers.split(","):
            for mib in map(int, given.mib.split(",")):
                found = measure(contenders, mib, optimizer, given.rounds)
                if not given.json:
                    print(table(found) if rows else f"{HEAD}\n{table(found)}", flush=True)
                rows += found
    if given.json:
        machine = {"cpus": os.cpu_count(), "machine": platform.platform(), "python": platform.python_version()}
        print(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1))
    return 0 if all(row.right for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())

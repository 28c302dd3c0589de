"""Dense parameters: push the gradient, step the optimizer, pull the parameters. All rows in one run, rounds
interleaved.

    python -m benchmarks.dense [--mib 1,16,64] [--rounds 15] [--optimizers SGD,Adam] [--rows floor,tcp,...]
    [--calls 2000] [--peers FOLDER]
                               [--bind] [--markdown | --json]

Times vary with the machine; the ratios within one run are what counts. `net` is what /proc/net/dev saw on the
loopback device per round (bytes received, so 64 MiB there and back show as 134 MB); a UNIX socket shows none.
`CPU ms` of a round are those of each process, ours and the peers' servers first. torch's rows choose the
chunks that are fastest (torch_peers.py), and name them. All processes get memory as `trireme run` lets its
members have it (malloc.TUNABLES). Rounds in which everybody else on the machine took more than a tenth of a
core are repeated, at most three times as many; stderr says what the rounds that count had.

A second table tells of our rows how late the event loops were (99th percentile and worst, ours being woken
every 2 ms; up to 1 ms is the loop's own clock), and how much memory a pserver and a trainer took above their
start, against their bounds (a trainer's: 2 vectors, since nothing computes with a third one here, and
measurements.TRAINER_MIB). With --calls, a third one tells how long almost empty calls take. --peers: Ray and
MXNet, from virtual environments in that folder (see benchmarks/other_systems). --bind takes the kernel's
choice away, which here may put both ends of a row on one core for a whole run: then a round takes what both
take of a processor, one after the other.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from benchmarks import other_systems
from benchmarks.baselines import Floor, Remote
from benchmarks.dense_trireme import Trireme
from benchmarks.measurements import machine_ms, p99_and_max
from benchmarks.spread import quartiles
from benchmarks.torch_peers import Gloo, Peers, Rpc
from trireme_shared.platform.runtime import process_setup

TITLES = {
    "floor": "floor: raw duplex sockets, threads, TCP",
    "tcp": "ours, stream, TCP",
    "unix": "ours, stream, UNIX socket",
    "shm": "ours, stream, shared memory",
    "tcp-bf16": "ours, stream, TCP, bfloat16 both ways",
    "unix-bf16": "ours, stream, UNIX socket, bfloat16 both ways",
    "rpc-tcp": "torch RPC, TCP",
    "rpc": "torch RPC, default",
    "tcp2": "ours, stream, TCP, 2 trainers",
    "unix2": "ours, stream, UNIX socket, 2 trainers",
    "unix2x2": "ours, stream, UNIX socket, 2 trainers, 2 pservers",
    "shm2": "ours, stream, shared memory, 2 trainers",
    "shm2x2": "ours, stream, shared memory, 2 trainers, 2 pservers",
    "gloo": "gloo all-reduce + local step, 2 ranks",
    "ray": "Ray, an actor",
    "mxnet": "MXNet, dist_sync (ps-lite)",
}
BASES: tuple[str, ...] = ("floor", "rpc-tcp", "rpc", "gloo", "tcp")
WARM_UP = 3
QUIET, TRIES = 0.1, 3  # others' cores in a round that counts; at most so many times the rounds are tried
EVERY = os.sched_getaffinity(0)  # cores


class Contender(Protocol):
    """Anything that can be asked to do rounds; `round` gives seconds, `cpu` those of each of its processes so
    far, `check` whether the numbers came out right."""

    def setup(self, mib: int, optimizer: str) -> None: ...
    def round(self) -> float: ...
    def cpu(self) -> list[float]: ...
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
    cpu_ms: list[float]
    right: bool
    ratios: dict[str, float]
    how: str = ""
    inside: Inside | None = None


@dataclass
class Inside:
    """Of our own rows: (99th percentile, worst) delay of the event loops, memory of a pserver and of a
    trainer."""

    pserver_lag_ms: tuple[float, float]
    trainer_lag_ms: tuple[float, float]
    pserver_mib: float
    bound_mib: float
    trainer_mib: float
    trainer_bound_mib: float


@dataclass
class Round:
    """Of one row: seconds, bytes on the loopback device, seconds of each process."""

    took: float
    moved: int
    cpu: list[float]


@dataclass
class Calls:
    row: str
    p50_us: float
    p99_us: float
    worst_us: float


def makers(directory: str, block_kib: int) -> dict[str, Callable[[], Contender]]:
    return {
        "floor": Floor,
        "tcp": lambda: Trireme("tcp", 1, "", block_kib),
        "unix": lambda: Trireme("unix", 1, f"{directory}/one.sock", block_kib),
        "shm": lambda: Trireme("shm", 1, f"{directory}/three.sock", block_kib),
        "tcp-bf16": lambda: Trireme("tcp", 1, "", block_kib, "bfloat16"),
        "unix-bf16": lambda: Trireme("unix", 1, f"{directory}/narrow.sock", block_kib, "bfloat16"),
        "rpc-tcp": lambda: Rpc(tcp_only=True),
        "rpc": lambda: Rpc(tcp_only=False),
        "tcp2": lambda: Trireme("tcp", 2, "", block_kib),
        "unix2": lambda: Trireme("unix", 2, f"{directory}/two.sock", block_kib),
        "unix2x2": lambda: Trireme("unix", 2, f"{directory}/each.sock", block_kib, pservers=2),
        "shm2": lambda: Trireme("shm", 2, f"{directory}/four.sock", block_kib),
        "shm2x2": lambda: Trireme("shm", 2, f"{directory}/six.sock", block_kib, pservers=2),
        "gloo": Gloo,
    }


def other_systems_in(folder: Path) -> dict[str, Callable[[], Contender]]:
    """Those that can be started there; says on stderr what is missing."""
    found: dict[str, Callable[[], Contender]] = {}
    for name in other_systems.NAMES:
        python = other_systems.python_of(folder, name)
        if python is None:
            print(
                f"{name} cannot be imported in {folder / name}; how to install it: {other_systems.__file__}",
                file=sys.stderr,
            )
        else:
            found[name] = partial(other_systems.OtherSystem, name, python)
    return found


def loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    return 0


def measure(contenders: dict[str, Contender], mib: int, optimizer: str, rounds: int) -> list[Row]:
    for contender in contenders.values():
        contender.setup(mib, optimizer)
    for _ in range(WARM_UP):
        round_of(contenders)
    for contender in contenders.values():
        if isinstance(contender, Trireme):
            contender.keep_rounds(())
    tried: list[tuple[float, dict[str, Round]]] = []
    while len(tried) < TRIES * rounds and sum(others < QUIET for others, _ in tried) < rounds:
        tried.append(round_of(contenders))
    kept = sorted(range(len(tried)), key=lambda number: tried[number][0])[:rounds]
    worst = tried[kept[-1]][0]
    print(
        f"{mib} MiB, {optimizer}: others took at most {worst:.2f} cores; {len(tried)} rounds", file=sys.stderr
    )
    times = {name: [tried[number][1][name].took for number in kept] for name in contenders}
    medians = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    rows = []
    for name, contender in contenders.items():
        low, _, high = quartiles([value * 1e3 for value in times[name]])
        ratios = {
            other: medians[name] / medians[other]
            for other in ("floor", "rpc-tcp", "rpc", "gloo", "tcp")
            if other in medians
        }
        net = statistics.median(tried[number][1][name].moved for number in kept) / 1e6
        spent = zip(*(tried[number][1][name].cpu for number in kept), strict=True)
        cpu_ms = [statistics.median(each) * 1e3 for each in spent]
        if isinstance(contender, Trireme):
            contender.keep_rounds(kept)
        inside = inside_of(contender)  # before the check, which takes memory
        how = contender.how if isinstance(contender, Peers) else ""
        best, right = min(times[name]) * 1e3, contender.check()
        rows.append(
            Row(
                name,
                mib,
                optimizer,
                medians[name],
                best,
                (low, high),
                net,
                cpu_ms,
                right,
                ratios,
                how,
                inside,
            )
        )
    return rows


def round_of(contenders: dict[str, Contender]) -> tuple[float, dict[str, Round]]:
    """One round of each, and how many cores everybody else took meanwhile."""
    start, machine, own, found = time.perf_counter(), machine_ms(), time.process_time(), {}
    for name, contender in contenders.items():
        before, cpu = loopback_bytes(), contender.cpu()
        took = contender.round()
        spent = [after - earlier for after, earlier in zip(contender.cpu(), cpu, strict=True)]
        found[name] = Round(took, loopback_bytes() - before, spent)
    ours = time.process_time() - own + sum(sum(each.cpu) for name, each in found.items() if name != "floor")
    ours += found["floor"].cpu[0] if "floor" in found else 0.0  # its client is this process
    others = (machine_ms() - machine) / 1e3 - ours
    return others / (time.perf_counter() - start), found


def inside_of(contender: Contender) -> Inside | None:
    if not isinstance(contender, Trireme):
        return None
    pserver, trainer = (tuple(1e3 * lag for lag in p99_and_max(lags)) for lags in contender.lags())
    took = zip(contender.memory(), (contender.bound, contender.trainer_bound), strict=True)
    return Inside(pserver, trainer, *(size / (1 << 20) for both in took for size in both))


def calls_of(contenders: dict[str, Contender], count: int) -> list[Calls]:
    found = []
    for name, contender in contenders.items():
        if isinstance(contender, Trireme):
            took = [1e6 * each for each in contender.calls(count)]
            found.append(Calls(name, statistics.median(took), *p99_and_max(took)))
    return found


HEAD = (
    "| what | MiB | optimizer | median ms | quartiles | best | CPU ms | net MB | x floor | x RPC "
    "TCP | x RPC | x gloo | right |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def table(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        ratios = " | ".join(
            f"{row.ratios[k]:.2f}" if k in row.ratios else "" for k in ("floor", "rpc-tcp", "rpc", "gloo")
        )
        low, high = row.quartiles_ms
        lines.append(
            f"| {TITLES[row.row]}{row.how and f', {row.how}'} | {row.mib} | {row.optimizer} | "
            f"{row.median_ms:.1f} | {low:.1f}-{high:.1f} | "
            f"{row.lowest_ms:.1f} | {' + '.join(f'{ms:.0f}' for ms in row.cpu_ms)} | "
            f"{row.net_mb:.0f} | {ratios} | {'yes' if row.right else 'NO'} |"
        )
    return "\n".join(lines)


INSIDE_HEAD = (
    "\n| what | MiB | optimizer | pserver's loop late, p99-worst ms | trainers' loops late | "
    "pserver MiB | bound | trainer MiB | bound |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
CALLS_HEAD = "\n| an almost empty call | p50 us | p99 us | worst us |\n|---|---|---|---|"


def inside_table(rows: list[Row]) -> str:
    return "\n".join(
        f"| {TITLES[row.row]} | {row.mib} | {row.optimizer} | "
        f"{of.pserver_lag_ms[0]:.1f}-{of.pserver_lag_ms[1]:.1f} | "
        f"{of.trainer_lag_ms[0]:.1f}-{of.trainer_lag_ms[1]:.1f} | {of.pserver_mib:.0f} | "
        f"{of.bound_mib:.0f} | "
        f"{of.trainer_mib:.0f} | {of.trainer_bound_mib:.0f} |"
        for row in rows
        if (of := row.inside) is not None
    )


def bound(name: str) -> Iterator[set[int]]:
    """The cores of a row's processes, servers first; rows of more than two processes may use all. The last
    core is that of this process as well, which is the floor's client."""
    every = sorted(EVERY)
    os.sched_setaffinity(0, {every[-1]})
    return itertools.repeat(EVERY) if "2" in name else itertools.cycle([{every[0]}, {every[-1]}])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", default="1,16,64")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--optimizers", default="SGD,Adam")
    parser.add_argument("--rows", default=",".join(TITLES))
    parser.add_argument(
        "--calls", type=int, default=0, help="how many almost empty calls to time, one after the other"
    )
    parser.add_argument(
        "--peers", type=Path, metavar="FOLDER", help="of virtual environments with ray and mxnet in them"
    )
    parser.add_argument("--bind", action="store_true", help="bind the two processes of a row to a core each")
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--markdown", action="store_true", help="the default")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    # as `trireme run` starts its members; for everybody
    os.environ.update(process_setup.memory_tunables(os.environ))
    rows: list[Row] = []
    calls: list[Calls] = []
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        contenders: dict[str, Contender] = {}
        known = makers(directory, given.block_kib) | (other_systems_in(given.peers) if given.peers else {})
        for name, make in known.items():
            if name in given.rows.split(","):
                if given.bind:
                    Remote.cores = bound(name)
                contenders[name] = make()
                stack.callback(contenders[name].close)
        for optimizer in given.optimizers.split(","):
            for mib in map(int, given.mib.split(",")):
                found = measure(contenders, mib, optimizer, given.rounds)
                if not given.json:
                    print(table(found) if rows else f"{HEAD}\n{table(found)}", flush=True)
                rows += found
        if given.calls:
            calls = calls_of(contenders, given.calls)
    if not given.json and any(row.inside for row in rows):
        print(f"{INSIDE_HEAD}\n{inside_table(rows)}")
    if not given.json and calls:
        lines = [f"| {TITLES[c.row]} | {c.p50_us:.0f} | {c.p99_us:.0f} | {c.worst_us:.0f} |" for c in calls]
        print("\n".join([CALLS_HEAD, *lines]))
    if given.json:
        machine = {
            "cpus": os.cpu_count(),
            "machine": platform.platform(),
            "python": platform.python_version(),
        }
        print(
            json.dumps(
                {
                    "machine": machine,
                    "rows": [asdict(row) for row in rows],
                    "calls": [asdict(call) for call in calls],
                },
                indent=1,
            )
        )
    return 0 if all(row.right for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())

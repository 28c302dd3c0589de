"""What many generations leave behind in those that live through them: one trainer of a small job is killed
again and again.

Each death is a generation, and each return is another one. Descriptors, threads and memory are those of the
surviving trainer and of the master, keys those of etcd. Its event log grows to a limit (the newest events),
so it is told apart.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from pathlib import Path

from benchmarks.collective.endless import endless
from benchmarks.collective.exchange import progress
from benchmarks.step_rows import LOOK_S, exchanges
from trireme.launch.cluster import LocalCluster

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "charlm" / "charlm.py"
WARM_UP, LIMIT_S = 20, 120.0
HEAD = (
    "| after rebuilds | descriptors: trainer, master | threads | MiB | etcd keys + chunks of the event "
    "log |\n|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Seen:
    rebuilds: int
    descriptors: tuple[int, int]
    threads: tuple[int, int]
    mib: tuple[float, float]
    keys: int
    events: int


async def measure(count: int, folder: Path) -> list[Seen]:
    """At WARM_UP rebuilds, in the middle, and at the end."""
    spec = endless(SCRIPT, folder / "run", trainers=2, lanes=2)
    due = sorted({min(WARM_UP, count), (WARM_UP + count) // 2, count})
    found: list[Seen] = []
    async with LocalCluster(spec, folder / "run") as cluster:
        await _whole(cluster)
        first = _generation(cluster)
        while found[-1].rebuilds < count if found else True:
            before = _generation(cluster)
            cluster.kill("trainer-1", signal.SIGKILL)
            await _whole(cluster, beyond=before + 1)
            rebuilds = _generation(cluster) - first
            if due and rebuilds >= due[0]:
                while due and rebuilds >= due[0]:
                    due.pop(0)
                found.append(await _seen(cluster, rebuilds))
                progress(f"{rebuilds} rebuilds: {found[-1]}")
    return found


async def _whole(cluster: LocalCluster, beyond: int = 0) -> None:
    """Both trainers have lanes, in a generation of at least that number."""
    async with asyncio.timeout(LIMIT_S):
        while (
            _generation(cluster) < beyond
            or cluster.directory.trainers.owner_count < 2
            or len(await exchanges(cluster)) < 2
        ):
            await asyncio.sleep(LOOK_S)


def _generation(cluster: LocalCluster) -> int:
    return cluster.directory.state.generation if cluster.directory.state is not None else 0


async def _seen(cluster: LocalCluster, rebuilds: int) -> Seen:
    pids = [cluster.children[name].pid for name in ("trainer-0", "master-0")]
    keys = [kv.key for kv in (await cluster.etcd.range("/", prefix=True, keys_only=True)).kvs]
    events = sum("/events/" in key for key in keys)
    files = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids]
    status = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    threads = [int(_line(text, "Threads")) for text in status]
    mib = [int(_line(text, "VmRSS").split()[0]) / 1024 for text in status]
    return Seen(
        rebuilds, (files[0], files[1]), (threads[0], threads[1]), (mib[0], mib[1]), len(keys) - events, events
    )


def _line(text: str, name: str) -> str:
    return next(line.partition(":")[2].strip() for line in text.splitlines() if line.startswith(f"{name}:"))


def table(found: list[Seen]) -> str:
    return "\n".join(
        f"| {each.rebuilds} | {each.descriptors[0]}, {each.descriptors[1]} | {each.threads[0]}, "
        f"{each.threads[1]} | "
        f"{each.mib[0]:.0f}, {each.mib[1]:.0f} | {each.keys} + {each.events} |"
        for each in found
    )

"""Many members join: python -m benchmarks.members [--trainers 1000] [--pservers 100] [--join-seconds 10]
[--json]. With --jobs: a cluster with many jobs and many who look (benchmarks/cluster_members.py).

A real etcd that syncs every write and a real master, each a process; the members are simulated in
`--processes` others (benchmarks/simulated_members.py): real keys, leases, watches and requests for tasks,
without models. Trainers join evenly over `--join-seconds`, parameter servers over the first
`--pserver-seconds` of them (the job runs once these are there, so that each later join is one to a running
job). Settled: every member knows the generation with all trainers in it, and every trainer has a task of each
of its lanes in it (asynchronous: one task, or it waits for one).

    to settle   seconds from the last join until all are settled
    told        keys and values that etcd sent to the members until then
    requests    of the members to the master and to etcd, until all are settled; then, for `--calm-seconds`,
                per second
    CPU         seconds from the first join until all are settled; `cores`: divided by that time
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks import cluster_members
from benchmarks.dispatch import LAYOUT, TOKEN, cpu_s, machine_cpu_s, memory_mib
from benchmarks.measurements import clean_environment
from trireme_shared.platform import etcd as etcd_client
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobSpec, Mode
from trireme_shared.protocol.records.datasets import Npy

JOB = "members"
KEYS = Keys(JOB)
START_S = 60.0
SETTLE_S = 120.0
SOON_S = 0.5


@dataclass(frozen=True)
class Result:
    """`cpu_s`: master, etcd, members, others (all else on the machine)."""

    trainers: int
    pservers: int
    join_s: float
    settle_s: float
    generations: int
    told_mib: float
    events: int
    master_requests: int
    etcd_requests: int
    cpu_s: dict[str, float]
    elapsed_s: float
    master_mib: float
    calm_master_requests_per_s: float
    calm_etcd_requests_per_s: float
    calm_cores: dict[str, float]


class Processes:
    """An etcd, a master and the processes of the members; enter it."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.members: list[asyncio.subprocess.Process] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="trireme-bench-")))
        (folder / "spec.json").write_bytes(_spec(self.given, folder).to_bytes())
        self.embedded = EmbeddedEtcd(folder / "etcd", log_path=folder / "etcd.log")
        self._stack.push_async_callback(self.embedded.stop)
        await self.embedded.start()
        self.etcd = etcd_client.connect([self.embedded.url])
        self._stack.push_async_callback(self.etcd.close)
        clean = clean_environment()
        settings = {"TOKEN": TOKEN, "JOB": JOB, "ETCD": self.embedded.url, "SPEC": str(folder / "spec.json")}
        log = self._stack.enter_context((folder / "master.log").open("wb"))
        self.master = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "master_service"),
            env=clean | {f"TRIREME_{name}": value for name, value in settings.items()},
            stdout=log,
            stderr=log,
        )
        self._stack.push_async_callback(_end, self.master)
        self.directory = Directory(self.etcd, KEYS)
        following = asyncio.ensure_future(self.directory.run())
        self._stack.callback(following.cancel)
        await self.directory.wait_for(lambda view: view.master is not None, START_S, "the master")
        for number in range(self.given.processes):
            process = await self._start_members(number)
            self._stack.push_async_callback(_end, process)
            self.members.append(process)
        for process in self.members:
            await _line(process, "ready", START_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start_members(self, number: int) -> asyncio.subprocess.Process:
        given = self.given
        options = {
            "job": JOB,
            "etcd": self.embedded.url,
            "token": TOKEN,
            "first": number,
            "processes": given.processes,
            "all-trainers": given.trainers,
            "all-pservers": given.pservers,
            "join-seconds": given.join_seconds,
            "pserver-seconds": min(given.pserver_seconds, given.join_seconds),
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-m", "benchmarks.simulated_members", *words)
        return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 20)

    def cpu_s(self) -> dict[str, float]:
        """Of each kind of process since it began."""
        members = sum(cpu_s(process.pid) for process in self.members)
        own = {"master": cpu_s(self.master.pid), "etcd": cpu_s(self.embedded.pid or 0), "members": members}
        return own | {"others": machine_cpu_s() - sum(own.values())}


def _spec(given: argparse.Namespace, folder: Path) -> JobSpec:
    rows = folder / "x.npy"
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({given.tasks},), }}".ljust(117) + "\n"
    rows.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode())
    os.truncate(rows, rows.stat().st_size + given.tasks)
    mode = Mode(given.mode)
    return JobSpec(
        job=JOB,
        script="none.py",
        dataset=Npy(str(rows)),
        mode=mode,
        lanes=given.lanes if mode is Mode.SYNC else 1,
        global_batch_size=given.lanes if mode is Mode.SYNC else 1,
        records_per_task=1,
        pservers=given.pservers,
        trainers=given.trainers,
        storage=str(folder),
        checkpoint_every_seconds=None,  # nobody is behind the parameter servers
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


async def _line(process: asyncio.subprocess.Process, what: str, limit_s: float) -> dict[str, Any]:
    assert process.stdout is not None
    async with asyncio.timeout(limit_s):
        line = await process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of members ended before it was {what}; its error is above")
    told: dict[str, Any] = json.loads(line)
    assert told["what"] == what, told
    return told


async def measure(given: argparse.Namespace) -> Result:
    async with Processes(given) as processes:
        cpu, begin = processes.cpu_s(), time.monotonic() + SOON_S
        for process in processes.members:
            assert process.stdin is not None
            process.stdin.write(f"{begin}\n".encode())
        limit_s = given.join_seconds + SETTLE_S
        async with asyncio.TaskGroup() as group:
            group.create_task(_initialise(processes, limit_s))
            settling = [
                group.create_task(_line(process, "settled", limit_s)) for process in processes.members
            ]
        found = [each.result() for each in settling]
        settled_cpu, settled_at = processes.cpu_s(), time.monotonic()
        await asyncio.sleep(given.calm_seconds)
        calm_cpu, calm_s = processes.cpu_s(), time.monotonic() - settled_at
        ended = []
        for process in processes.members:
            assert process.stdin is not None
            process.stdin.close()
        ended = [await _line(process, "done", START_S) for process in processes.members]
        master_mib = memory_mib(processes.master.pid)
    requests, later = _requests(found), _requests(ended)
    to_master, to_etcd = requests.pop("master", 0), requests.total()
    later_to_master, later_to_etcd = later.pop("master", 0), later.total()
    return Result(
        trainers=given.trainers,
        pservers=given.pservers,
        join_s=given.join_seconds,
        settle_s=max(each["settled"] for each in found) - max(each["joined"] for each in found),
        generations=max(each["generation"] for each in found),
        told_mib=sum(each["told"] for each in found) / 2**20,
        events=sum(each["events"] for each in found),
        master_requests=to_master,
        etcd_requests=to_etcd,
        cpu_s={name: settled_cpu[name] - cpu[name] for name in cpu},
        elapsed_s=settled_at - begin + SOON_S,
        master_mib=master_mib,
        calm_master_requests_per_s=(later_to_master - to_master) / calm_s,
        calm_etcd_requests_per_s=(later_to_etcd - to_etcd) / calm_s,
        calm_cores={name: (calm_cpu[name] - settled_cpu[name]) / calm_s for name in cpu},
    )


async def _initialise(processes: Processes, limit_s: float) -> None:
    """As the first trainer does, once all parameter servers are there."""
    view = processes.directory
    await view.wait_for(lambda seen: seen.slots is not None, limit_s, "all parameter servers")
    await processes.etcd.put(KEYS.layout, LAYOUT.to_bytes())
    await processes.etcd.put(KEYS.init_done, b"done")


def _requests(found: list[dict[str, Any]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in found:
        total.update(each["requests"])
    return total


def _table(result: Result) -> str:
    cores = {name: seconds / result.elapsed_s for name, seconds in result.cpu_s.items()}
    rows = {
        "members": f"{result.trainers} trainers, {result.pservers} parameter servers",
        "join, s": f"{result.join_s:g}",
        "to settle after the last join, s": f"{result.settle_s:.1f}",
        "generations": f"{result.generations}",
        "told to members, MiB": f"{result.told_mib:.1f}",
        "changes of keys told": f"{result.events:,}",
        "requests to master, etcd": f"{result.master_requests:,}, {result.etcd_requests:,}",
        "CPU s (cores): " + ", ".join(cores): ", ".join(
            f"{result.cpu_s[name]:.1f} ({share:.2f})" for name, share in cores.items()
        ),
        "master MiB": f"{result.master_mib:.0f}",
        "calm: requests/s to master, etcd": (
            f"{result.calm_master_requests_per_s:.0f}, {result.calm_etcd_requests_per_s:.0f}"
        ),
        "calm: cores": ", ".join(f"{share:.2f}" for share in result.calm_cores.values()),
    }
    return "| what | measured |\n|---|---|\n" + "\n".join(
        f"| {name} | {value} |" for name, value in rows.items()
    )


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trainers", type=int, default=1000)
    parser.add_argument("--pservers", type=int, default=100, help="at most 128")
    parser.add_argument("--join-seconds", type=float, default=10.0)
    parser.add_argument("--pserver-seconds", type=float, default=2.0)
    parser.add_argument("--calm-seconds", type=float, default=5.0)
    parser.add_argument("--processes", type=int, default=2, help="of the simulated members")
    parser.add_argument("--mode", choices=["sync", "async"], default="sync")
    parser.add_argument("--lanes", type=int, default=1024, help="of a synchronous job")
    parser.add_argument(
        "--tasks", type=int, default=10_000, help="fewer than trainers, asynchronous: the others wait"
    )
    parser.add_argument("--json", action="store_true")
    cluster_members.add_arguments(parser)
    return parser.parse_args(words)


def main() -> None:
    given = arguments()
    if given.jobs:
        cluster_members.run(given)
        return
    telemetry.configure(level="ERROR", service="benchmark")  # stdout is the table's
    result = asyncio.run(measure(given))
    print(json.dumps(asdict(result)) if given.json else _table(result))


if __name__ == "__main__":
    main()

"""Tasks at the master: acquire + complete pairs per second, memory and failover, whatever the length of the
queue.

    python -m benchmarks.dispatch [--tasks 1e3,1e5,1e7] [--clients 1,16,64] [--requests 2,1] [--client
    lean,trainer]
                                  [--seconds 4] [--no-failover] [--masterless 1,4,8] [--markdown | --json]

A real etcd that syncs every write, a real leading master and a standby as processes; the clients are all in
this process: `lean` ones (benchmarks/minimal_client.py: HTTP, token and records are real, the cost is not a
trainer's) or the trainers' own (trainer_agent/tasks/source.py). A pair is two requests, or one: completeTask
with `next`. Members are keys that nobody is behind, a task is one record. CPU milliseconds per pair, of each
process, say what limits a row; `sync` is the median time of an fdatasync on that disk, beside each
measurement. Failover: from SIGKILL of the leader to the first task that the standby gives; the leader's lease
(`--ttl` seconds) is part of it unless the standby finds the port refused before. `--masterless`: the same
without a master, for so many trainers, each a process (benchmarks/masterless.py).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Self

from benchmarks import masterless
from benchmarks.measurements import clean_environment
from benchmarks.minimal_client import MinimalMaster
from trainer_agent.tasks.master import HttpMaster
from trireme_shared.platform import etcd as etcd_client
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.runtime import http, telemetry
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import (
    AcquireTask,
    CompleteTask,
    JobSpec,
    Mode,
    PserverMember,
    TakeNext,
    Task,
    TrainerMember,
)
from trireme_shared.protocol.records.datasets import Npy
from trireme_shared.protocol.records.layout import Layout, OptimizerSpec

JOB = "dispatch"
TOKEN = "benchmark"
KEYS = Keys(JOB)
LAYOUT = Layout(
    segments=(),
    block_bytes=1 << 20,
    digest="none",
    optimizer=OptimizerSpec(name="SGD", defaults={}, groups=({},)),
)
START_S = 60.0
WARM_UP_S = 1.0
WAIT_S = 0.005
TICKS = os.sysconf("SC_CLK_TCK")

Port = HttpMaster | MinimalMaster


@dataclass
class Row:
    """`cpu_ms`: per pair, of master, etcd, clients. `others`: cores that all other processes used.
    `failover_s` is measured once for each number of tasks."""

    tasks: int
    clients: int
    client: str
    requests: int
    pairs_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms: dict[str, float]
    sync_ms: float
    others: float
    master_mib: float
    failover_s: float | None = None


class Job:
    """An etcd, two masters and the members of a job of `tasks` tasks; enter it."""

    def __init__(self, tasks: int, members: int, ttl_s: float) -> None:
        self.tasks, self.members, self._ttl_s = tasks, members, ttl_s
        self.masters: dict[str, asyncio.subprocess.Process] = {}
        self.embedded: EmbeddedEtcd
        self.directory: Directory
        self.port: HttpMaster
        self._stack = AsyncExitStack()
        self._requests = itertools.count()

    async def __aenter__(self) -> Self:
        folder = self._folder = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="trireme-bench-"))
        )
        spec = self._spec(folder)
        (folder / "spec.json").write_bytes(spec.to_bytes())
        self.embedded = EmbeddedEtcd(folder / "etcd", log_path=folder / "etcd.log")
        self._stack.push_async_callback(self.embedded.stop)
        await self.embedded.start()
        etcd = etcd_client.connect([self.embedded.url])
        self._stack.push_async_callback(etcd.close)
        self.directory = Directory(etcd, KEYS)
        following = asyncio.ensure_future(self.directory.run())
        self._stack.callback(following.cancel)
        for name in ("master-0", "master-1"):
            self._stack.push_async_callback(self._end, name)
            await self._start(name, folder)
        client = await self._stack.enter_async_context(http.session(TOKEN))
        self.port = HttpMaster(self.directory, client, etcd)
        await self._register(etcd)
        await self.directory.wait_for(lambda view: view.master is not None, START_S, "a master")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _spec(self, folder: Path) -> JobSpec:
        rows = folder / "x.npy"
        header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({self.tasks},), }}".ljust(117) + "\n"
        rows.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode())
        os.truncate(rows, rows.stat().st_size + self.tasks)
        return JobSpec(
            job=JOB,
            script="none.py",
            dataset=Npy(str(rows)),
            mode=Mode.ASYNC,
            epochs=1000,
            lanes=1,
            global_batch_size=1,
            records_per_task=1,
            pservers=1,
            trainers=self.members,
            storage=str(folder),
            checkpoint_kind="independent",  # no pauses: nobody is behind the parameter server
        )

    async def _start(self, name: str, folder: Path) -> None:
        environment = clean_environment()
        environment |= {
            "TRIREME_TOKEN": TOKEN,
            "TRIREME_JOB": JOB,
            "TRIREME_ETCD": self.embedded.url,
            "TRIREME_NAME": name,
        }
        environment |= {"TRIREME_SPEC": str(folder / "spec.json"), "TRIREME_MASTER_TTL_S": str(self._ttl_s)}
        with (folder / f"{name}.log").open("wb") as log:
            self.masters[name] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "master_service"), env=environment, stdout=log, stderr=log
            )
        await self.directory.wait_for(lambda view: view.master is not None, START_S, "the first master")

    async def _end(self, name: str) -> None:
        process = self.masters.get(name)
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _register(self, etcd: etcd_client.Etcd) -> None:
        lease = (await etcd.grant(3600)).id
        common = {"url": "http://127.0.0.1:9", "host": "nowhere", "pid": 1, "lease": lease}
        pserver = PserverMember(index=0, incarnation="pserver-0-0", **common)
        await etcd.put(KEYS.pserver(0), pserver.to_bytes(), lease)
        for number in range(self.members):
            name = f"trainer-{number}-0"
            trainer = TrainerMember(trainer=name, incarnation=name, **common)
            await etcd.put(KEYS.trainer(name), trainer.to_bytes(), lease)
        await etcd.put(KEYS.layout, LAYOUT.to_bytes())
        await etcd.put(KEYS.init_done, b"done")

    # ------------------------------------------------------------ what is measured

    def leader(self) -> asyncio.subprocess.Process:
        assert self.directory.master is not None
        port = self.directory.master.url.rpartition(":")[2]
        return next(found for found in self.masters.values() if _listens(found.pid, int(port)))

    def _ask(self, trainer: str) -> AcquireTask:
        return AcquireTask(trainer=trainer, request=f"r{next(self._requests)}", generation=self._generation)

    @property
    def _generation(self) -> int:
        return self.directory.state.generation if self.directory.state else 0

    async def acquired(self, port: Port, trainer: str) -> Task:
        """A task (at the end of an epoch: waited for). Raises TriremeError."""
        while (task := (await port.acquire_task(self._ask(trainer))).task) is None:
            await asyncio.sleep(WAIT_S)
        return task

    async def completed(self, port: Port, trainer: str, task: Task, *, take: bool = False) -> Task | None:
        """The next task if it is to be taken and there is one at once. Raises TriremeError."""
        following = (
            TakeNext(request=f"r{next(self._requests)}", generation=self._generation) if take else None
        )
        done = CompleteTask(
            trainer=trainer, attempt=task.attempt, epoch=task.epoch, records=1, next=following
        )
        return (await port.complete_task(task.task_id, done)).next

    async def until_served(self, limit_s: float) -> None:
        """Until a pair went through. Raises TimeoutError."""
        async with asyncio.timeout(limit_s):
            while True:
                try:
                    task = await self.acquired(self.port, "trainer-0-0")
                    await self.completed(self.port, "trainer-0-0", task)
                    return
                except TriremeError:
                    await asyncio.sleep(0.02)

    async def measure(self, clients: int, client: str, requests: int, seconds: float) -> Row:
        took: list[float] = []
        warm, end = perf_counter() + WARM_UP_S, perf_counter() + WARM_UP_S + seconds
        processes = {"master": self.leader().pid, "etcd": self.embedded.pid or 0, "clients": os.getpid()}

        async def train(trainer: str, port: Port) -> None:
            task: Task | None = None
            while (begun := perf_counter()) < end:
                if task is None:
                    task = await self.acquired(port, trainer)
                task = await self.completed(port, trainer, task, take=requests == 1)
                if begun >= warm:
                    took.append(perf_counter() - begun)
            if task is not None:
                await self.completed(port, trainer, task)

        async with self._ports(client, clients) as ports, asyncio.TaskGroup() as group:
            for number, port in enumerate(ports):
                group.create_task(train(f"trainer-{number}-0", port))
            await asyncio.sleep(WARM_UP_S)
            before, all_before = {name: cpu_s(pid) for name, pid in processes.items()}, machine_cpu_s()
            await asyncio.sleep(seconds)
            after, all_after = {name: cpu_s(pid) for name, pid in processes.items()}, machine_cpu_s()
        took.sort()
        return Row(
            tasks=self.tasks,
            clients=clients,
            client=client,
            requests=requests,
            pairs_per_s=len(took) / seconds,
            p50_ms=took[len(took) // 2] * 1e3,
            p99_ms=took[len(took) * 99 // 100] * 1e3,
            cpu_ms={name: (after[name] - before[name]) * 1e3 / len(took) for name in processes},
            sync_ms=sync_ms(self._folder),
            others=(all_after - all_before - sum(after.values()) + sum(before.values())) / seconds,
            master_mib=memory_mib(processes["master"]),
        )

    @asynccontextmanager
    async def _ports(self, client: str, count: int) -> AsyncIterator[list[Port]]:
        if client == "trainer":
            yield [self.port] * count
            return
        assert self.directory.master is not None
        lean = [await MinimalMaster(self.directory.master.url, TOKEN).connect() for _ in range(count)]
        try:
            yield list(lean)
        finally:
            for port in lean:
                port.close()

    async def failover(self) -> float:
        """Seconds from SIGKILL of the leader to a pair at the standby."""
        leader = self.leader()
        begun = perf_counter()
        leader.send_signal(signal.SIGKILL)
        await leader.wait()
        await self.until_served(START_S)
        return perf_counter() - begun


def cpu_s(pid: int) -> float:
    """User and system time of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def machine_cpu_s() -> float:
    """Of all processes: all but idle and waiting."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS


def memory_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def sync_ms(folder: Path, times: int = 50) -> float:
    """Median of an fdatasync after 2 KB appended, where etcd writes."""
    took = []
    with (folder / "sync").open("wb", buffering=0) as file:
        for _ in range(times):
            file.write(b"x" * 2048)
            begun = perf_counter()
            os.fdatasync(file.fileno())
            took.append(perf_counter() - begun)
    return sorted(took)[times // 2] * 1e3


def _listens(pid: int, port: int) -> bool:
    import psutil

    return any(
        found.laddr.port == port
        for found in psutil.Process(pid).net_connections()
        if found.status == "LISTEN"
    )


HEAD = (
    "| tasks | clients | requests a pair | pairs/s | p50 ms | p99 ms | CPU ms a pair: master, "
    "etcd, clients | others' cores | sync ms | master MiB | failover s |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def line(row: Row) -> str:
    cpu = ", ".join(f"{row.cpu_ms[name]:.2f}" for name in ("master", "etcd", "clients"))
    failover = "" if row.failover_s is None else f"{row.failover_s:.2f}"
    return (
        f"| {row.tasks:.0e} | {row.clients} {row.client} | {row.requests} | {row.pairs_per_s:.0f} "
        f"| {row.p50_ms:.1f} | "
        f"{row.p99_ms:.1f} | {cpu} | {row.others:.2f} | {row.sync_ms:.1f} | {row.master_mib:.0f} | "
        f"{failover} |"
    )


@asynccontextmanager
async def job_of(tasks: int, members: int, ttl_s: float) -> AsyncIterator[Job]:
    async with Job(tasks, members, ttl_s) as job:
        await job.until_served(START_S)
        yield job


async def run(given: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for tasks in (int(float(number)) for number in given.tasks):
        async with job_of(tasks, max(given.clients), given.ttl) as job:
            found = [
                await job.measure(clients, client, requests, given.seconds)
                for clients, client, requests in itertools.product(
                    given.clients, given.client, given.requests
                )
            ]
            if given.failover:
                found[-1].failover_s = await job.failover()
        for row in found:
            if not given.json:
                print(line(row) if rows else f"{HEAD}\n{line(row)}", flush=True)
            rows.append(row)
    return rows


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=["1e3", "1e5", "1e7"])
    parser.add_argument("--clients", type=numbers, default=[1, 16, 64])
    parser.add_argument(
        "--requests", type=numbers, default=[2, 1], help="a pair: 2, or 1 (completeTask with `next`)"
    )
    parser.add_argument("--client", type=lambda text: text.split(","), default=["lean"], help="lean, trainer")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--ttl", type=float, default=3.0, help="of the leader's lease")
    parser.add_argument("--no-failover", dest="failover", action="store_false")
    parser.add_argument("--masterless", type=numbers, default=[], help="trainers of the masterless rows")
    parser.add_argument("--markdown", action="store_true", help="the default")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    import uvloop

    telemetry.configure(level="WARNING", service="benchmark")  # stdout is the table's
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(run(given))
        bare = runner.run(masterless.rows(given.masterless, given.seconds))
    if given.json:
        machine = {
            "cpus": os.cpu_count(),
            "machine": platform.platform(),
            "python": platform.python_version(),
        }
        print(
            json.dumps(
                {"machine": machine, "rows": [asdict(row) for row in rows], "masterless": bare}, indent=1
            )
        )
    elif bare:
        print("\n" + masterless.table(bare))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

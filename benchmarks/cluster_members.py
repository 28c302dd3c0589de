"""Many jobs, many places and many who look: python -m benchmarks.members --jobs 1000 [--places 4000]
[--dashboards 20] [--viewers 50] [--seconds 30] [--changes 20] [--json]

A real etcd that syncs every write and a real leader of a cluster, each a process; the places are simulated in
`--processes` others (benchmarks/simulated_places.py). Every job has one parameter server and an equal part of
the other places as trainers; some more trainers would be of use to each. Dashboards and viewers are in this
process: a dashboard asks for jobs, pool and members every 2 s, each at a time of its own, and holds the
stream of the cluster's events, a viewer holds the stream of one job's; every second one of a job that has
ended. Once all jobs train, for `--seconds`:

    late         by how much the leader's loop wakes too late (it sleeps for 2 ms at a time)
    schedule     a place joins `--changes` times: from its key in etcd to its assignment
    etcd alone   after each of them: from a key in etcd until its watch tells it; a schedule needs that twice
    jobs listed  how long a dashboard waits for its page of jobs
    descriptors, MiB  of the leader
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp

from benchmarks.dispatch import TOKEN, cpu_s, memory_mib
from benchmarks.measurements import clean_environment, p99_and_max
from benchmarks.simulated_places import TTL_S
from trireme.client import AsyncClient, CreateJob
from trireme_shared.platform import etcd as etcd_client
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd
from trireme_shared.platform.etcd.operations import WatchBatch
from trireme_shared.platform.runtime import http, ids, telemetry
from trireme_shared.protocol.keys import ClusterKeys
from trireme_shared.protocol.records.cluster import PoolMember

START_S = 120.0
DASHBOARD_S = 2.0
ENDED = 20  # jobs that have ended, for viewers
AT_ONCE = 8  # requests that create jobs
LOOK_S = 0.5
SYNCED_S = 0.3  # etcd brings a new watch up to date every 100 ms, until then it tells nothing at once


@dataclass(frozen=True)
class Found:
    """Times in milliseconds; (median, 99 %, most) or (99 %, most). `cores`: of the leader while it was
    watched; `worked`: at most so much of `late` its own thread worked."""

    jobs: int
    places: int
    dashboards: int
    viewers: int
    start_s: float
    late_ms: tuple[float, float]
    worked_ms: tuple[float, float]
    schedule_ms: tuple[float, float, float]
    etcd_alone_ms: tuple[float, float, float]
    listed_ms: tuple[float, float, float]
    descriptors: int
    descriptors_of_etcd: int
    leader_mib: float
    cores: float
    events: int


class Cluster:
    """An etcd, a leader and the processes of the places; enter it."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.keys = given, ClusterKeys()
        self.url = ""
        self.places: list[asyncio.subprocess.Process] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self.folder = folder = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="trireme-bench-"))
        )
        self.embedded = EmbeddedEtcd(folder / "etcd", log_path=folder / "etcd.log")
        self._stack.push_async_callback(self.embedded.stop)
        await self.embedded.start()
        self.etcd = etcd_client.connect([self.embedded.url])
        self._stack.push_async_callback(self.etcd.close)
        self.client = await self._stack.enter_async_context(http.session(TOKEN))
        await self._start_leader()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start_leader(self) -> None:
        clean = clean_environment()
        self.probe = self.folder / "probe.json"
        settings = {"TOKEN": TOKEN, "ETCD": self.embedded.url, "STORAGE": str(self.folder / "jobs")}
        settings |= {"PROBE": str(self.probe), "LOG_LEVEL": "WARNING", "MASTER_TTL_S": "30"}
        log = self._stack.enter_context((self.folder / "leader.log").open("wb"))
        self.leader = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.measured_member", "master_service"),
            env=clean
            | {f"TRIREME_{name}": value for name, value in settings.items()}
            | {"PYTHONHASHSEED": "0"},
            stdout=log,
            stderr=log,
        )
        self._stack.push_async_callback(end, self.leader)
        async with asyncio.timeout(START_S):
            while (found := await self.etcd.get(self.keys.address)) is None:
                await asyncio.sleep(0.05)
        self.url = json.loads(found.value)["url"]

    async def start_places(self) -> None:
        given = self.given
        for number in range(given.processes):
            options = {
                "etcd": self.embedded.url,
                "token": TOKEN,
                "url": self.url,
                "first": number,
                "processes": given.processes,
                "places": given.places,
                "places-of-job": given.places // given.jobs,
                "task-seconds": given.task_seconds,
            }
            words = [f"--{name}={value}" for name, value in options.items()]
            pipe = asyncio.subprocess.PIPE
            command = (sys.executable, "-m", "benchmarks.simulated_places", *words)
            process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
            self._stack.push_async_callback(end, process)
            self.places.append(process)
        async with asyncio.timeout(START_S):
            for process in self.places:
                assert process.stdout is not None
                told = await process.stdout.readline()
                assert told, "a process of places ended before it was ready; its error is above"

    async def get(self, path: str, **query: Any) -> dict[str, Any]:
        async with self.client.get(f"{self.url}{path}", params=query) as response:
            response.raise_for_status()
            found: dict[str, Any] = await response.json()
            return found


async def end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


def rows_of(folder: Path, tasks: int) -> str:
    rows = folder / "x.npy"
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({tasks},), }}".ljust(117) + "\n"
    rows.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode())
    os.truncate(rows, rows.stat().st_size + tasks)
    return str(rows)


async def create_jobs(cluster: Cluster) -> list[str]:
    """And some that have ended. Answers the names of those that train."""
    given, places = cluster.given, asyncio.Semaphore(AT_ONCE)
    trainers = given.places // given.jobs - 1
    settings = {
        "dataset": {"kind": "npy", "urls": [rows_of(cluster.folder, given.tasks)]},
        "mode": "async",
        "global_batch_size": 1,
        "records_per_task": 1,
        "pservers": 1,
        "trainers": trainers,
        "task_timeout_floor_s": 600.0,
        "checkpoint_every_seconds": None,
        "lease_ttl_s": TTL_S,
    }
    # one more than there are places for: who joins is of use at once
    scheduling = {"min_trainers": 1, "max_trainers": trainers + 1}

    ended = [f"ended-{number}" for number in range(min(ENDED, given.viewers))]
    names = [f"job-{number}" for number in range(given.jobs)]
    # while thousands of processes start on two cores, an answer may take long
    async with AsyncClient(cluster.url, token=TOKEN, timeout_s=START_S) as client:

        async def create(name: str) -> None:
            job = {"name": name, "settings": settings, "script": "none.py", "scheduling": scheduling}
            async with places:
                await client.create_job(CreateJob.model_validate(job))

        await asyncio.gather(*map(create, ended))
        await asyncio.gather(*map(client.cancel_job, ended))
        await asyncio.gather(*map(create, names))
    return names


async def until_all_train(cluster: Cluster) -> None:
    given = cluster.given
    async with asyncio.timeout(START_S + given.jobs):
        while True:
            token, states = "", []
            while True:
                query = {"page_token": token} if token else {}
                page = await cluster.get("/v1/jobs", page_size=1000, **query)
                states += [job["state"] for job in page["jobs"]]
                if not (token := page["next_page_token"]):
                    break
            if states.count("RUNNING") == given.jobs:
                return
            await asyncio.sleep(LOOK_S)


class Lookers:
    """Dashboards and viewers. `listed`: seconds of each page of jobs."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.listed, self.events = cluster, [0.0], 0
        self.listed.clear()

    async def dashboard(self, number: int) -> None:
        await asyncio.sleep(DASHBOARD_S * number / self.cluster.given.dashboards)
        async with asyncio.TaskGroup() as group:
            group.create_task(self.follow("/v1/cluster/events/stream"))
            while True:
                begin = time.monotonic()
                with suppress(aiohttp.ClientError):  # its leader is not one for a moment
                    size = self.cluster.given.page
                    await self.cluster.get("/v1/jobs", page_size=size, newest_first="true")
                    self.listed.append(time.monotonic() - begin)
                    await self.cluster.get("/v1/pool")
                    await self.cluster.get("/v1/pool-members", page_size=size)
                await asyncio.sleep(DASHBOARD_S - min(DASHBOARD_S, time.monotonic() - begin))

    async def follow(self, path: str) -> None:
        while True:
            with suppress(aiohttp.ClientError):
                async with self.cluster.client.get(f"{self.cluster.url}{path}") as response:
                    response.raise_for_status()
                    async for line in response.content:
                        self.events += line.startswith(b"id: ")
            await asyncio.sleep(LOOK_S)


async def opened(batches: AsyncGenerator[WatchBatch, None]) -> asyncio.Task[WatchBatch]:
    """The next batch of a watch that is open, after its snapshot."""
    await anext(batches)

    async def following() -> WatchBatch:
        return await anext(batches)

    told = asyncio.ensure_future(following())
    await asyncio.sleep(SYNCED_S)
    return told


async def schedule_times(cluster: Cluster) -> tuple[list[float], list[float]]:
    """Seconds from a place's key to its assignment, and from another key until its watch tells it."""
    given, keys = cluster.given, cluster.keys
    lease = await cluster.etcd.grant(TTL_S + given.seconds)
    times, alone = list[float](), list[float]()
    for number in range(given.changes):
        name = f"new-{number}"
        member = PoolMember(
            member=name, kind="trainer", host="new", agent="new", pid=1, incarnation=ids.new_id(name)
        )
        assigned = cluster.etcd.watch(keys.assignment("trainer", name))
        async with aclosing(assigned) as batches, asyncio.timeout(START_S):
            told = await opened(batches)
            begin = time.monotonic()
            await cluster.etcd.put(keys.member("trainer", name), member.to_bytes(), lease.id)
            await told
            times.append(time.monotonic() - begin)
        async with aclosing(cluster.etcd.watch("/benchmark")) as batches, asyncio.timeout(START_S):
            told = await opened(batches)
            begin = time.monotonic()
            await cluster.etcd.put("/benchmark", b"")
            await told
            alone.append(time.monotonic() - begin)
        await asyncio.sleep(given.seconds / given.changes)
    return times, alone


async def measure(given: argparse.Namespace) -> Found:
    begin = time.monotonic()
    async with Cluster(given) as cluster:
        await cluster.start_places()
        names = await create_jobs(cluster)
        await until_all_train(cluster)
        start_s = time.monotonic() - begin
        lookers = Lookers(cluster)
        followed = itertools.cycle(
            itertools.chain.from_iterable(
                zip(names, itertools.cycle([f"ended-{n}" for n in range(min(ENDED, given.viewers))] or names))
            )
        )
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(lookers.dashboard(n)) for n in range(given.dashboards)]
            for name in itertools.islice(followed, given.viewers):
                path = f"/v1/jobs/{name}/events/stream"
                tasks.append(group.create_task(lookers.follow(path)))
            await asyncio.sleep(2 * DASHBOARD_S)
            lookers.listed.clear()
            cluster.leader.send_signal(signal.SIGUSR1)
            cpu, watched = cpu_s(cluster.leader.pid), time.monotonic()
            times, alone = await schedule_times(cluster)
            cores = (cpu_s(cluster.leader.pid) - cpu) / (time.monotonic() - watched)
            cluster.leader.send_signal(signal.SIGUSR2)
            descriptors = _open_files(cluster.leader.pid), _open_files(cluster.embedded.pid or 0)
            mib = memory_mib(cluster.leader.pid)
            async with asyncio.timeout(START_S):
                while not cluster.probe.exists():
                    await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
        probe = json.loads(cluster.probe.read_text())
    return Found(
        jobs=given.jobs,
        places=given.places,
        dashboards=given.dashboards,
        viewers=given.viewers,
        start_s=start_s,
        late_ms=_in_ms(p99_and_max(probe["lags"])),
        worked_ms=_in_ms(p99_and_max(probe["worked"])),
        schedule_ms=_in_ms((statistics.median(times), *p99_and_max(times))),
        etcd_alone_ms=_in_ms((statistics.median(alone), *p99_and_max(alone))),
        listed_ms=_in_ms((statistics.median(lookers.listed or [0.0]), *p99_and_max(lookers.listed))),
        descriptors=descriptors[0],
        descriptors_of_etcd=descriptors[1],
        leader_mib=mib,
        cores=cores,
        events=lookers.events,
    )


def _in_ms(times: tuple[float, ...]) -> Any:
    return tuple(round(1000 * each, 1) for each in times)


def _open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def table(found: Found) -> str:
    counts = (found.jobs, found.places, found.dashboards, found.viewers)
    rows = {
        "jobs, places, dashboards, viewers": ", ".join(map(str, counts)),
        "until all train, s": f"{found.start_s:.0f}",
        "leader's loop late, ms: 99 %, most": f"{found.late_ms[0]:g}, {found.late_ms[1]:g}",
        "of it worked, ms: 99 %, most": f"{found.worked_ms[0]:g}, {found.worked_ms[1]:g}",
        "schedule after a place has joined, ms: median, 99 %, most": ", ".join(map(str, found.schedule_ms)),
        "etcd alone, ms: median, 99 %, most": ", ".join(map(str, found.etcd_alone_ms)),
        "jobs listed, ms: median, 99 %, most": ", ".join(map(str, found.listed_ms)),
        "descriptors of leader, of etcd": f"{found.descriptors}, {found.descriptors_of_etcd}",
        "leader MiB": f"{found.leader_mib:.0f}",
        "leader's cores": f"{found.cores:.2f}",
        "events streamed": f"{found.events}",
    }
    return "| what | measured |\n|---|---|\n" + "\n".join(
        f"| {name} | {value} |" for name, value in rows.items()
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=0, help="a cluster with so many; 0: one job, see above")
    parser.add_argument("--places", type=int, default=4000, help="at least two for each job")
    parser.add_argument("--dashboards", type=int, default=20)
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument("--page", type=int, default=100, help="jobs that a dashboard asks for")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--changes", type=int, default=20)
    parser.add_argument("--task-seconds", type=float, default=30.0)


def run(given: argparse.Namespace) -> None:
    telemetry.configure(level="ERROR", service="benchmark")
    found = asyncio.run(measure(given))
    print(json.dumps(asdict(found)) if given.json else table(found))

"""The rows of steps.py: processes that train, stopped (SIGSTOP) and let go on as a whole, and what they say
of themselves."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from benchmarks.measured_member import FILE, WITHOUT_METRICS
from benchmarks.measurements import TICK_MS, machine_ms, p99_and_max
from benchmarks.small_set import small_set
from trainer_agent.collective.groups import pserver_of
from trainer_agent.data_plane.http import HttpPserver
from trainer_agent.script import user_module
from trireme.launch.cluster import LocalCluster
from trireme.launch.processes import PYTHON_MODULE, ForkServer, Process
from trireme.plain import plain_spec
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.runtime import clock, process_setup
from trireme_shared.protocol.records import PserverMember, Strategy, TrainerMember
from trireme_shared.protocol.records.job_spec import JobSpec

START_S, WARM_UP_STEPS = 300.0, 5  # a limit: 20,000,000 rows of plain PyTorch on a busy machine take minutes
EVALUATED_EVERY = 20
PLAIN_RUNS = 3
ROOT = str(Path(__file__).resolve().parents[1])
SETTLE_S = 0.3  # after going on: caches, timers that ran out meanwhile
LOOK_S = 0.005
PROBED = ("trainer_agent", "pserver_service")
LEASE_S = 600.0  # members must outlive the time in which others are measured


@dataclass(frozen=True, slots=True)
class Window:
    """What a row did in a stretch of time; processor time in milliseconds for each step, by role.
    `foreign_cores`: what everybody else on the machine, this process included, took meanwhile."""

    steps_per_s: float
    cpu_ms: dict[str, float]
    foreign_cores: float


@dataclass(frozen=True, slots=True)
class Inside:
    """By role: (99th percentile, worst) in ms by which event loops were late, the worst of it that was their
    own work, and the most MiB that one process took."""

    lag_ms: dict[str, tuple[float, float]]
    own_ms: dict[str, float]
    mib: dict[str, float]


@dataclass
class TorchRow:
    """`ranks` processes of benchmarks.torch_steps. `tuned`: as fast as they can be; else torch's defaults.
    `more`: its other options; `environment`: more variables of the processes."""

    script: Path
    batch: int
    ranks: int
    tuned: bool
    folder: Path
    more: dict[str, int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        self.folder.mkdir()
        self._steps = self.folder / "steps"
        for rank in range(self.ranks):
            options = {"batch": self.batch, "ranks": self.ranks, "rank": rank, "steps": self._steps}
            options |= {"store": self.folder / "store", **self.more}
            given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
            command = [sys.executable, "-m", "benchmarks.torch_steps", str(self.script), *given]
            environment = {**os.environ, **self.environment}
            if self.tuned:
                command.append("--tuned")
                environment |= process_setup.memory_tunables(environment)
            self._processes.append(subprocess.Popen(command, env=environment))
        try:
            async with asyncio.timeout(START_S):
                while len(self._times()) < WARM_UP_STEPS:
                    self._check_alive()
                    await asyncio.sleep(LOOK_S)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    def _check_alive(self) -> None:
        """Raises RuntimeError. Torch's own crashes: sparse all_reduce over Gloo has ended with a corrupted
        heap."""
        for rank, process in enumerate(self._processes):
            if (code := process.poll()) is not None:
                raise RuntimeError(
                    f"rank {rank} of {self.script.name} ended with {code}; what it printed is above"
                )

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def pids(self) -> dict[str, list[int]]:
        return {"trainers": [process.pid for process in self._processes]}

    async def window(self, seconds: float) -> Window:
        before = Usage(self.pids())
        await asyncio.sleep(seconds)
        async with asyncio.timeout(START_S):
            while sum(end >= before.now for end in self._times()) < 2:
                self._check_alive()
                await asyncio.sleep(LOOK_S)
        used = Usage(self.pids()).since(before)
        ends = [end for end in self._times() if before.now <= end <= before.now + used.now]
        rate = (len(ends) - 1) / (ends[-1] - ends[0])
        return used.window(rate, rate * used.now)

    def _times(self) -> list[float]:
        if not self._steps.exists():
            return []
        return [float(line) for line in self._steps.read_text().split("\n")[:-1]]


@dataclass
class OurRow:
    """A job on a LocalCluster, with a lane for each trainer; trainers and parameter servers run under
    benchmarks.measured_member. Modes beside those of jobs, all synchronous: `collective`, without parameter
    servers; `bare`, without metrics; `saved`, with a checkpoint every EVALUATED_EVERY steps; `evaluated` as
    often, over a few records. `more`: other settings."""

    script: Path
    batch: int
    mode: str
    pservers: int
    folder: Path
    clip_grad_norm: float | None = None
    trainers: int = 2
    more: Mapping[str, str] = field(default_factory=dict)

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        one_lane = plain_spec(user_module.load(self.script), {})
        changes: dict[str, Any] = {
            "mode": "async" if self.mode == "async" else "sync",
            "strategy": Strategy.COLLECTIVE if self.mode == "collective" else Strategy.PARAMETER_SERVER,
            "lanes": self.trainers,
            "clip_grad_norm": self.clip_grad_norm,
            "trainers": self.trainers,
            "pservers": self.pservers,
            "epochs": 100_000,
            "global_batch_size": self.batch,
            "block_bytes": JobSpec.model_fields[
                "block_bytes"
            ].default,  # charlm has smaller ones, to be seen on more servers
            "checkpoint_every_epochs": None,
            "checkpoint_every_seconds": None,
            "checkpoint_every_steps": EVALUATED_EVERY if self.mode == "saved" else None,
            "evaluate_every": EVALUATED_EVERY if self.mode == "evaluated" else None,
            "evaluation_dataset": small_set(one_lane.dataset, self.folder / "small.json")
            if self.mode == "evaluated"
            else None,
            "storage": str(self.folder / "run"),
            "lease_ttl_s": LEASE_S,
            **self.more,
        }
        self.spec: JobSpec = type(one_lane).model_validate({**one_lane.model_dump(), **changes})
        forks = self._stack.enter_context(ProbedForks(self.folder, bare=self.mode == "bare"))
        self.cluster = await self._stack.enter_async_context(
            LocalCluster(self.spec, self.folder / "run", forks=forks)
        )
        self._ports: list[HttpPserver] = []
        try:
            async with asyncio.timeout(START_S):
                await self._all_there()
                while await self.updates() < WARM_UP_STEPS:
                    await asyncio.sleep(LOOK_S)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _all_there(self) -> None:
        if self.mode == "collective":
            while len(members := await exchanges(self.cluster)) < self.trainers:
                await asyncio.sleep(LOOK_S)
            self._ports.append(await self._stack.enter_async_context(HttpPserver(members[0])))
            return
        while len(found := [p for p in self.cluster.directory.pservers.values() if p.url]) < self.pservers:
            await asyncio.sleep(LOOK_S)
        for member in found:
            self._ports.append(await self._stack.enter_async_context(HttpPserver(member)))

    async def updates(self) -> float:
        """Optimizer steps so far, of the mean block."""
        infos = [await port.info() for port in self._ports]
        if self.mode == "collective":
            return float(infos[0].highest)
        blocks = sum(info.blocks for info in infos)
        return sum(info.updates for info in infos) / blocks if blocks else 0.0

    @property
    def evaluations(self) -> int:
        """So many are over."""
        status = self.cluster.directory.evaluation
        return status.settled if status is not None else 0

    def pids(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {
            "trainers": [],
            "pservers": [],
            "others": [self.cluster.embedded.pid or 0],
        }
        for name, child in self.cluster.children.items():
            if child.starts > 1:
                raise RuntimeError(f"{name} was started {child.starts} times; its log is {child.log}")
            role = f"{name.partition('-')[0]}s"
            found[role if role in found else "others"].append(child.pid)
        return found

    async def window(self, seconds: float) -> Window:
        since, first = await self._next_step()
        before = Usage(self.pids())
        await asyncio.sleep(seconds)
        used, counted = Usage(self.pids()).since(before), await self.updates()
        until, last = await self._next_step()
        if counted == first:
            raise SystemExit(f"no step ended in {seconds:g} s: give more --seconds")
        return used.window((last - first) / (until - since), counted - first)

    async def _next_step(self) -> tuple[float, float]:
        """(when, how many there are then) as soon as one more is whole."""
        begun = await self.updates()
        while int(now := await self.updates()) == int(begun):
            await asyncio.sleep(LOOK_S)
        return clock.monotonic(), now

    async def inside(self, seconds: float) -> Inside:
        names = [name for name in self.cluster.children if name.partition("-")[0] in {"trainer", "pserver"}]
        for name in names:
            self.cluster.kill(name, signal.SIGUSR1)
        await asyncio.sleep(seconds)
        for name in names:
            self.cluster.kill(name, signal.SIGUSR2)
        lags: dict[str, list[float]] = {"trainers": [], "pservers": []}
        own, mib = dict.fromkeys(lags, 0.0), dict.fromkeys(lags, 0.0)
        for name in names:
            file, role = self.folder / f"{name}.json", f"{name.partition('-')[0]}s"
            async with asyncio.timeout(START_S):
                while not file.exists():
                    await asyncio.sleep(LOOK_S)
            seen = json.loads(file.read_text())
            lags[role] += seen["lags"]
            own[role] = max([own[role], *(1000 * worked for worked in seen["worked"])])
            mib[role] = max(mib[role], (seen["memory"] - seen["borrowed"]) / (1 << 20))
        late = {role: p99_and_max(values) for role, values in lags.items()}
        return Inside({role: (1000 * p99, 1000 * worst) for role, (p99, worst) in late.items()}, own, mib)


async def exchanges(cluster: LocalCluster) -> list[PserverMember]:
    """Where the trainers of a collective job answer, as far as the job counts on them."""
    keys = cluster.directory.keys
    found = (await cluster.etcd.range(keys.trainers, prefix=True)).kvs
    members = [read_record(TrainerMember, kv.key, kv.value) for kv in found if keys.is_trainer(kv.key)]
    return [pserver_of(each) for each in members if each is not None and each.exchange and each.holds]


class ProbedForks(ForkServer):
    """Starts trainers and parameter servers under benchmarks.measured_member; each writes into `folder`.
    `bare`: without metrics."""

    def __init__(self, folder: Path, *, bare: bool = False) -> None:
        self._bare = bare
        # for the fork server too, which imports benchmarks.measured_member wherever this was started
        before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, *(path for path in before if path != ROOT)])
        super().__init__()
        self._folder = folder

    async def start(
        self, argv: Sequence[str], environment: Mapping[str, str], out: IO[bytes], err: IO[bytes]
    ) -> Process:
        if argv[3] in PROBED:
            argv = [*PYTHON_MODULE, "benchmarks.measured_member", *argv[3:]]
            environment = {**environment, FILE: str(self._folder / f"{environment['TRIREME_NAME']}.json")}
            environment |= {WITHOUT_METRICS: "1"} if self._bare else {}
        return await super().start(argv, environment, out, err)


Row = TorchRow | OurRow


async def stopped(stack: AsyncExitStack, row: Row) -> Row:
    """Started, and stopped until `in_turns` lets it go on."""
    await stack.enter_async_context(row)
    stack.callback(send, row, signal.SIGCONT)
    send(row, signal.SIGSTOP)
    return row


async def in_turns(
    rows: Mapping[str, Row], rounds: int, seconds: float, told: Callable[[int, str, Window], None]
) -> dict[str, list[Window]]:
    """Windows of rows that are stopped: in each round one after the other goes on, every second round in the
    opposite order. `told`: of each window."""
    windows: dict[str, list[Window]] = {name: [] for name in rows}
    for number in range(rounds):
        for name in rows if number % 2 == 0 else reversed(list(rows)):
            send(rows[name], signal.SIGCONT)
            await asyncio.sleep(SETTLE_S)
            windows[name].append(await rows[name].window(seconds))
            send(rows[name], signal.SIGSTOP)
            told(number, name, windows[name][-1])
    return windows


def send(row: Row, number: signal.Signals) -> None:
    """To all processes of a row: whoever asks others is stopped before them, and goes on after them."""
    pids = list(itertools.chain.from_iterable(row.pids().values()))
    for pid in pids if number is signal.SIGSTOP else reversed(pids):
        os.kill(pid, number)


def bind(row: Row) -> None:
    """Trainers (or ranks) to a core each, with the threads that they have."""
    cores = sorted(os.sched_getaffinity(0))
    for pid, core in zip(row.pids()["trainers"], itertools.cycle(cores), strict=False):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})


class Usage:
    """Processor time so far, in ms: of these processes by role, and of the whole machine. `now` in
    seconds."""

    def __init__(self, pids: Mapping[str, Sequence[int]]) -> None:
        self.now = clock.monotonic()
        self.roles = {role: sum(map(_of_process, each)) for role, each in pids.items()}
        self.machine = machine_ms()

    def since(self, before: Self) -> Self:
        self.now -= before.now
        self.roles = {role: ms - before.roles[role] for role, ms in self.roles.items()}
        self.machine -= before.machine
        return self

    def window(self, steps_per_s: float, steps: float) -> Window:
        foreign = (self.machine - sum(self.roles.values())) / 1000 / self.now
        return Window(steps_per_s, {role: ms / steps for role, ms in self.roles.items()}, foreign)


def _of_process(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_MS


def activations_mib(script: Path, batch: int) -> float:
    """What a plain process takes at a batch beyond parameters and gradients: the most of some, which differ
    by a tenth, as the most of a row's trainers is told."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.torch_steps",
        str(script),
        "--batch",
        str(batch),
        "--activations",
    ]
    answers = [
        subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=START_S)
        for _ in range(PLAIN_RUNS)
    ]
    return max(int(answer.stdout) for answer in answers) / (1 << 20)

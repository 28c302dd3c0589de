"""One `trireme run` in a folder, and what its job left. It can be killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from master_service.storage.series_files import StoredSeries, read_all
from tests.soak.isolation import SmallDisk
from tests.soak.plan import LEASE_S
from tests.soak.workload import CHARLM, Workload
from trainer_agent.data_plane.http import HttpPserver
from trireme.cli.chaos import JobProbe
from trireme.cli.targets import token_of_run
from trireme.client import AsyncClient
from trireme.launch import run_folder
from trireme.view.job_address import client_of
from trireme_shared.platform.runtime.process_setup import die_with_parent
from trireme_shared.platform.security.tokens import admin_token
from trireme_shared.protocol.errors import DeadlineExceeded, NotReady, PeerError
from trireme_shared.protocol.metrics import LOSS
from trireme_shared.protocol.records import Mode, Strategy
from trireme_shared.protocol.wire.messages import PserverInfo

T = TypeVar("T")
JOB = "soak"
STEPS_PER_EPOCH = CHARLM.steps_per_epoch
CHECKPOINT_EVERY_S = 1.0  # asynchronous
ALIVE_S = 60.0
END_S = 300.0
POLL_S = 0.05
DISK_MIB = 512  # etcd alone takes 128


class SoakError(AssertionError):
    """The job ended too early, or not at all, or with something else than it should have."""


@dataclass(frozen=True)
class Trained:
    """What a job left: the exported parameters, its own summary; the records it had (`windows`) and how often
    each was computed; `times`: of each minibatch, by the monotonic clock. `history`: synchronous, what the
    job itself has written of each step: (step, records). `epochs`: (first step, records) of each epoch, as
    the job has written them. Asynchronous: pserver -> lowest and highest minibatches of the whole job that
    its blocks have applied."""

    parameters: Mapping[str, torch.Tensor]
    summary: Mapping[str, Any]
    windows: Counter[str]
    computed: Counter[str]
    times: Sequence[float] = ()
    applied: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    history: Sequence[tuple[int, float]] | None = None
    epochs: Sequence[tuple[int, float]] = ()


class Run:
    """In `folder`: `data` and `checkpoints` (with `small_disks` each on a file system of its own), what the
    launcher wrote (`out`, `err`), which records were computed (`tally`). `transport`: see TRIREME_TRANSPORT.
    `etcd_port`: etcd has a port instead of a UNIX socket."""

    def __init__(
        self,
        folder: Path,
        epochs: int,
        *,
        trainers: int,
        pservers: int,
        standbys: int,
        spares: int,
        transport: str = "auto",
        mode: Mode = Mode.SYNC,
        small_disks: bool = False,
        etcd_port: bool = False,
        strategy: Strategy = Strategy.PARAMETER_SERVER,
        workload: Workload = CHARLM,
        lanes: int = 4,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._place, self._environment = folder, dict(environment or {})
        self._data, self._storage = folder / "data", folder / "checkpoints"
        self.folder = self._data / JOB
        self.mode, self.strategy, self.workload = mode, strategy, workload
        self._transport, self._lanes = transport, lanes
        self._program = "tests.soak.etcd_with_port" if etcd_port else "trireme"
        self._brake = folder / "brake"
        self._epochs = epochs
        self._members = {"trainers": trainers, "standbys": standbys}
        if strategy is Strategy.PARAMETER_SERVER:
            self._members |= {"pservers": pservers, "spare-pservers": spares}
        self._process: subprocess.Popen[bytes] | None = None
        self._began_at = 0
        (folder / "tally").mkdir(parents=True)
        self.disks = (
            [SmallDisk(path, DISK_MIB) for path in (self._data, self._storage)] if small_disks else []
        )
        workload.prepare(folder.parent / "text")

    def start(self) -> None:
        settings = {
            "lease_ttl_s": LEASE_S,
            "records_per_task": self.workload.records_per_task,
            "mode": self.mode,
        }
        settings |= {"lanes": self._lanes}
        settings |= (
            {"checkpoint_every_steps": 5}
            if self.mode is Mode.SYNC
            else {"checkpoint_every_seconds": CHECKPOINT_EVERY_S}
        )
        flags = {"job": JOB, "data-dir": self._data, "storage": self._storage}
        flags |= {"epochs": self._epochs, "global-batch-size": self.workload.batch}
        flags |= {"strategy": self.strategy}
        command = [sys.executable, "-m", self._program, "run", self.workload.path, "--no-check", "--json"]
        command += [word for name, value in (flags | self._members).items() for word in (f"--{name}", value)]
        command += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TRIREME_")}
        environment = clean | {
            "TRIREME_TRANSPORT": self._transport,
            "SOAK_BRAKE": str(self._brake),
            "SOAK_MODE": str(self.mode),
            "SOAK_TALLY": str(self._place / "tally"),
            self.workload.variable: str(self._place.parent / "text"),
            **self._environment,
        }
        with (self._place / "out").open("wb") as out, (self._place / "err").open("ab") as err:
            self._began_at = err.tell()
            self._process = subprocess.Popen(
                list(map(str, command)),
                env=environment,
                cwd=Path(__file__).parents[2],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                preexec_fn=die_with_parent(),
            )

    def kill_everything(self) -> None:
        """The launcher and all its children, as a power cut would."""
        assert self._process is not None
        launcher = psutil.Process(self._process.pid)
        family = [launcher, *launcher.children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        psutil.wait_procs(family, timeout=10)
        (self.folder / "run.json").unlink(missing_ok=True)

    def slow_down(self, seconds: float) -> None:
        """Each minibatch takes so much longer."""
        temporary = self._brake.with_suffix(".new")
        temporary.write_text(str(seconds))
        temporary.replace(self._brake)

    @property
    def exit_code(self) -> int | None:
        """Of the launcher; None while it runs."""
        return self._process.poll() if self._process is not None else None

    @property
    def url(self) -> str:
        """Of the master that led last. Raises PeerError before the first one."""
        facts = run_folder.read_json(self.folder / run_folder.RUN_FILE)
        if facts is None:
            raise PeerError("no master has led yet")
        return str(facts["url"])

    def check(self) -> None:
        """Raises SoakError if the launcher has ended."""
        if self.exit_code is not None:
            raise SoakError(f"the job ended too early, with exit code {self.exit_code}:\n{self.tail()}")

    async def end(self) -> Trained:
        applied = await self._applied() if self.mode is Mode.ASYNC else {}
        await until(lambda: self.exit_code is not None, END_S, "the job's end", lambda: None)
        if self.exit_code != 0:
            raise SoakError(f"the job failed with exit code {self.exit_code}:\n{self.tail()}")
        summary = json.loads((self._place / "out").read_text())
        parameters = torch.load(summary["exports"]["state_dict"], weights_only=True)
        windows, lines = self.workload.records(self._place.parent / "text"), _tally(self._place / "tally")
        times = sorted({float(time) for _, time in lines})
        computed, written = Counter(record for record, _ in lines), await self._written()
        return Trained(parameters, summary, windows, computed, times, applied, *written)

    async def _written(self) -> tuple[list[tuple[int, float]] | None, list[tuple[int, float]]]:
        """`history` and `epochs`."""
        if self.mode is not Mode.SYNC:
            return None, []
        (folder,) = (path for path in (self._storage / JOB).iterdir() if path.name.startswith("run-"))
        stored = await read_all(StoredSeries(str(folder)))
        steps = [(bucket.step, bucket.value.weight) for bucket in stored.table.by_name[LOSS]]
        return steps, [
            (epoch.first, epoch.sums[LOSS].weight) for _, epoch in sorted(stored.steps.epochs.items())
        ]

    async def _applied(self) -> dict[int, tuple[int, int]]:
        """When all is trained; job.py's evaluation takes long enough for a look."""
        async with JobProbe(self.folder) as probe:
            deadline = time.monotonic() + END_S
            while probe.state.stage == "TRAIN":
                self.check()
                if time.monotonic() > deadline:
                    raise SoakError(
                        f"not everything was trained {END_S:g} s after the last fault: {probe.state!r}"
                    )
                await asyncio.sleep(POLL_S)
            found = {}
            for info in await pserver_infos(probe):
                counts = [(epoch.applied_lowest, epoch.applied_highest) for epoch in info.ledger]
                found[info.index] = sum(low for low, _ in counts), sum(high for _, high in counts)
            return found

    def said(self) -> str:
        """What the launcher has written to stderr since its last start."""
        return (self._place / "err").read_bytes()[self._began_at :].decode(errors="replace")

    def tail(self) -> str:
        return "\n".join((self._place / "err").read_text(errors="replace").splitlines()[-30:])

    @contextmanager
    def cleaned_up(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._process is not None and self.exit_code is None:
                self.kill_everything()
            for disk in self.disks:
                disk.release("etcd")


async def until(holds: Callable[[], object], limit_s: float, what: str, check: Callable[[], None]) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        check()
        if time.monotonic() > deadline:
            raise SoakError(f"waited {limit_s:g} s for {what}")
        await asyncio.sleep(POLL_S)


async def asked(run: Run, call: Callable[[AsyncClient], Awaitable[T]]) -> T:
    """Of the master that leads, until it answers."""
    deadline = time.monotonic() + ALIVE_S
    while True:
        run.check()
        with contextlib.suppress(PeerError, DeadlineExceeded, NotReady):
            async with client_of(run.url, admin_token(run.folder)) as client:
                return await call(client)
        if time.monotonic() > deadline:
            raise SoakError(f"no master answered within {ALIVE_S:g} s:\n{run.tail()}")
        await asyncio.sleep(POLL_S)


async def pserver_infos(probe: JobProbe) -> list[PserverInfo]:
    """Of all parameter servers. Raises PeerError."""
    found = []
    for member in probe.directory.pservers.values():
        pserver = HttpPserver(member, token_of_run(probe.folder))
        try:
            found.append(await pserver.info())
        finally:
            await pserver.close()
    if len(found) != probe.directory.pservers_desired:
        raise PeerError(
            f"only {len(found)} of {probe.directory.pservers_desired} parameter servers are there"
        )
    return found


def _tally(folder: Path) -> list[list[str]]:
    return [line.split() for path in folder.iterdir() for line in path.read_text().splitlines()]

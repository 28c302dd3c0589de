"""A cluster on this machine: etcd, masters and one host agent as supervised child processes. Jobs are
submitted to its leader.

etcd ◄── master-0 … master-K      lead the jobs, one of them the cluster
  ▲──── host-0                    runs the members of the jobs, as the leader assigns them
  ▲──── trainers-0, pservers-0 …  more host agents, while jobs need more members
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from trireme.client import AsyncClient
from trireme.launch.processes import Child, Exit, revoke_lock_of, spawn
from trireme.launch.supervision import GRACE_S, PASSED_ON, ClusterSettings, SupervisedProcesses
from trireme.launchers.launcher import Launcher, LocalLauncher, Role
from trireme.launchers.sizing import Bounds, PoolSize
from trireme.view.child_events import ChildEvent
from trireme.view.job_address import client_of
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.protocol.errors import DeadlineExceeded, PeerError, TriremeError
from trireme_shared.protocol.keys import ClusterKeys
from trireme_shared.protocol.records import MasterAddress
from trireme_shared.protocol.records.cluster import Kind

DRAIN_S = 20.0
START_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """`trainers`, `pservers`: places from the start. `max_trainers`, `max_pservers`: so many while jobs need
    them (fewer than from the start: no more than these). `hosts` False: host agents are started by hand.
    `storage`: path or URL below which the files of jobs go. `job_retention_s`: jobs are deleted so long after
    their end (None: as the environment says, else never)."""

    trainers: int
    pservers: int
    storage: str
    settings: ClusterSettings
    max_trainers: int = 0
    max_pservers: int = 0
    hosts: bool = True
    job_retention_s: float | None = None

    def bounds(self, *, beside: bool) -> dict[Kind, Bounds]:
        """How many places of each kind a launcher may have. `beside`: the places from the start are not its
        own."""
        trainers, pservers = (0, 0) if beside else (self.trainers, self.pservers)
        return {
            "trainer": Bounds(trainers, trainers + max(0, self.max_trainers - self.trainers)),
            "pserver": Bounds(pservers, pservers + max(0, self.max_pservers - self.pservers)),
        }


class LocalPool(SupervisedProcesses[None]):
    """`folder` gets what SupervisedProcesses writes, and host/ with the logs of the jobs' members. `final` is
    an error if the cluster cannot go on."""

    # parameter servers leave before trainers, also those of one host; masters lead until all have left
    grace_s = {  # noqa: RUF012  never changed
        "pservers": DRAIN_S + 20.0,
        "host": 2 * DRAIN_S + 20.0,
        "trainers": DRAIN_S + 20.0,
        "master": GRACE_S,
    }
    start_timeout_s = START_TIMEOUT_S
    passed_on = (
        *(*PASSED_ON, "TRIREME_REBALANCE_S", "TRIREME_JOB_RETENTION_S", "TRIREME_LOG_LEVEL"),
        *("TRIREME_LOG_BYTES", "TRIREME_LOGS_BYTES", "TRIREME_STORAGE_ALLOWED"),
        *("TRIREME_MASTER_TTL_S", "TRIREME_AGENT_TTL_S"),
    )

    def __init__(
        self,
        request: PoolRequest,
        folder: Path,
        *,
        on_event: Callable[[ChildEvent], None] = lambda _: None,
    ) -> None:
        super().__init__(folder, request.settings, spawn, on_event)
        self.request = request
        self._url = ""
        self._keys = ClusterKeys()
        self._led = asyncio.Event()

    def __repr__(self) -> str:
        alive = sum(child.alive for child in self.children.values())
        return f"<LocalPool {self.url or 'without leader'}: {alive} of {len(self.children)} children alive>"

    @property
    def logs(self) -> str:
        """Where the members' logs are, for people."""
        return str(self.folder / "host" / "logs")

    @property
    def url(self) -> str:
        return self._url

    @property
    def way_without_etcd(self) -> str:
        return (
            f"the checkpoints of jobs lie in {self.request.storage} and do not depend on it: move "
            f"{self.embedded.data_dir} away, start the cluster again, and submit the jobs with --init-from"
        )

    async def leader_url(self) -> str:
        """Raises DeadlineExceeded if no master leads within `start_timeout_s`; ClusterError if the cluster
        cannot start."""
        timeout_s = self.start_timeout_s
        if not await self._unless_over(event_within(self._led, timeout_s)):
            msg = (
                f"no master leads the cluster after {timeout_s:g} s; their logs are in {self.folder / 'logs'}"
            )
            raise DeadlineExceeded(msg)
        return self.url

    async def wait(self) -> None:
        """Returns never: raises the error because of which the cluster cannot go on."""
        await self._until_final(None, lambda: "the cluster has ended")

    # ------------------------------------------------------------ what SupervisedProcesses asks for

    async def _start(self) -> None:
        await self._connect(self._keys.prefix)
        self.run_beside(self._follow_leader, "following the leader")
        await self._start_masters()
        if self.request.hosts:
            await self._start_hosts()

    async def _start_masters(self) -> None:
        await self._add_masters({"TRIREME_STORAGE": self.request.storage}, "host/logs", "hosts/*/logs")

    async def _start_hosts(self) -> None:
        """One agent for all places from the start; a launcher adds others when jobs need more."""
        if self.request.trainers + self.request.pservers:
            places = {"TRIREME_TRAINERS": self.request.trainers, "TRIREME_PSERVERS": self.request.pservers}
            await self._add_host(
                "host", self.folder / "host", {name: str(count) for name, count in places.items()}
            )
        self._size_with(LocalLauncher(self._add_hosts, self._remove_host), beside=True)

    def _size_with(self, launcher: Launcher, *, beside: bool) -> None:
        """The launcher starts more members when jobs need them. `beside`: the places from the start are not
        its own."""
        bounds = self.request.bounds(beside=beside)
        if any(each.most > each.least for each in bounds.values()):
            sizing = PoolSize(launcher, bounds, self.leader, self._record)
            self.run_beside(sizing.run, "following what jobs need")

    @asynccontextmanager
    async def leader(self) -> AsyncIterator[AsyncClient]:
        """Raises PeerError while there is none."""
        if not self.url:
            raise PeerError("no master leads the cluster yet")
        async with client_of(self.url, self.settings.token, REQUEST_TIMEOUT_S) as leader:
            yield leader

    # ------------------------------------------------------------ children

    async def _add_hosts(self, role: Role, places: int) -> str:
        """Start an agent with places of one kind for the launcher; returns its name in the pool."""
        counts = {
            "TRIREME_TRAINERS": 0,
            "TRIREME_PSERVERS": 0,
            f"TRIREME_{role.upper()}S": places,
            "TRIREME_CORES": places,
        }
        number = self._numbers[f"{role}s"]
        settings = {name: str(count) for name, count in counts.items()}
        child = await self._add_host(f"{role}s", self.folder / "hosts" / f"{role}s-{number}", settings)
        return child.environment["TRIREME_NAME"]

    async def _remove_host(self, agent: str) -> None:
        child = next(each for each in self.children.values() if each.environment["TRIREME_NAME"] == agent)
        await self._remove_child(child.name, self.grace_s[child.name.partition("-")[0]])

    async def _add_host(self, role: str, data_dir: Path, settings: Mapping[str, str]) -> Child:
        host = {"TRIREME_DATA_DIR": str(data_dir), "TRIREME_DRAIN_SECONDS": str(DRAIN_S)}
        if self.settings.etcd is not None:  # other hosts may be in the same pool
            name = socket.gethostname()
            host["TRIREME_NAME"] = name if role == "host" else f"{name}-{role}-{self._numbers[role]}"
        return await self._add(role, "trireme.host", {**settings, **host})

    def _common(self) -> dict[str, str]:
        retention_s = self.request.job_retention_s
        return {
            **super()._common(),
            "TRIREME_SOURCES": str(self.folder / "host" / "sources"),
            **({"TRIREME_JOB_RETENTION_S": str(retention_s)} if retention_s else {}),
        }

    async def _is_over(self, child: Child, end: Exit) -> bool:
        """All are needed until the end."""
        del child, end
        return False

    async def _mourn(self, child: Child, end: Exit) -> None:
        """A standby leads at once. A host agent that starts again revokes the lease of the one before
        itself."""
        del end
        with contextlib.suppress(TriremeError, TimeoutError):  # etcd is away: the lease expires by itself
            await revoke_lock_of(self.etcd, self._keys.lock, child.health_url)

    async def _follow_leader(self) -> None:
        key = self._keys.address
        async for batch in self.etcd.watch(key):
            values = [kv.value for kv in batch.kvs] if batch.reset else []
            values += [event.kv.value for event in batch.events if event.type == "put"]
            for value in values:
                address = read_record(MasterAddress, key, value)
                if address is not None:
                    self._url = address.url
                    self._led.set()

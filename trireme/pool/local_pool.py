"""A cluster on this machine: etcd, masters and one host agent as supervised child processes. Jobs are submitted to its leader.

etcd ◄── master-0 … master-K      lead the jobs, one of them the cluster
  ▲──── host-0                    runs the members of the jobs, as the leader assigns them
  ▲──── trainers-0, pservers-0 …  more host agents, while jobs need more members
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from trireme.client import AsyncClient
from trireme.launch.cluster import HOST
from trireme.launch.leases import REVOKE_TIMEOUT_S, revoke_all_leases
from trireme.launch.processes import Child, Exit, spawn
from trireme.launch.supervision import GRACE_S, SupervisedProcesses
from trireme.launchers.launcher import Launcher, Role
from trireme.launchers.local import LocalLauncher
from trireme.launchers.sizing import Bounds, PoolSize
from trireme.view.child_events import ChildEvent
from trireme.view.job_address import client_of
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership.etcd_access import EtcdAccess
from trireme_shared.platform.runtime.waiting import event_within
from trireme_shared.platform.security.tls import VARIABLES
from trireme_shared.platform.security.token_folder import TokenFolder
from trireme_shared.platform.security.tokens import Role as TokenRole
from trireme_shared.protocol.errors import DeadlineExceeded, PeerError, TriremeError
from trireme_shared.protocol.keys import ClusterKeys
from trireme_shared.protocol.records import MasterAddress, MasterLock
from trireme_shared.protocol.records.cluster import Kind

PASSED_ON = (
    "TRIREME_TRANSPORT",
    "TRIREME_REBALANCE_S",
    "TRIREME_JOB_RETENTION_S",
    "TRIREME_LOG_LEVEL",
    "TRIREME_ALLOWED_HOSTS",
    *VARIABLES,
)
DRAIN_S = 20.0
START_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """`trainers`, `pservers`: places from the start. `max_trainers`, `max_pservers`: so many while jobs need them (fewer than from the
    start: no more than these). `hosts` False: host agents are started by hand. `storage`: path or URL below which the files of jobs go. `etcd`: one that is there already;
    None: one of its own. `port`: of the first master (0: any free port). All listen at `host` and tell others `advertise` (default:
    `host`). `tokens`: of admins, members and viewers (None: nobody is asked for one). `job_retention_s`: jobs are deleted so long after their end (None: as
    the environment says, else never)."""

    trainers: int
    pservers: int
    storage: str
    tokens: TokenFolder | None = None
    standbys: int = 0
    port: int = 0
    host: str = HOST
    advertise: str = ""
    etcd: EtcdAccess | None = None
    max_trainers: int = 0
    max_pservers: int = 0
    hosts: bool = True
    job_retention_s: float | None = None

    @property
    def token(self) -> str:
        """An admin's, as it is now. Raises InvalidArgument."""
        return self.tokens.token(TokenRole.ADMIN) if self.tokens is not None else ""

    def bounds(self, *, beside: bool) -> dict[Kind, Bounds]:
        """How many places of each kind a launcher may have. `beside`: the places from the start are not its own."""
        trainers, pservers = (0, 0) if beside else (self.trainers, self.pservers)
        return {
            "trainer": Bounds(trainers, trainers + max(0, self.max_trainers - self.trainers)),
            "pserver": Bounds(pservers, pservers + max(0, self.max_pservers - self.pservers)),
        }


class LocalPool(SupervisedProcesses[None]):
    """`folder` gets what SupervisedProcesses writes, and host/ with the logs of the jobs' members. `final` is an error if the cluster
    cannot go on. `environment`: of all children, over the rest."""

    # parameter servers leave before trainers, also those of one host; masters lead until all have left
    grace_s = {  # noqa: RUF012  never changed
        "pservers": DRAIN_S + 20.0,
        "host": 2 * DRAIN_S + 20.0,
        "trainers": DRAIN_S + 20.0,
        "master": GRACE_S,
    }
    start_timeout_s = START_TIMEOUT_S

    def __init__(
        self,
        request: PoolRequest,
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        on_event: Callable[[ChildEvent], None] = lambda _: None,
    ) -> None:
        super().__init__(folder, spawn, on_event)
        self.request = request
        self.url = ""  # of the leader; "" while there is none
        self.etcd: Etcd
        self._extra = dict(environment or {})
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
    def etcd_access(self) -> EtcdAccess:
        return self.request.etcd or self.own_etcd

    async def leader_url(self) -> str:
        """Raises DeadlineExceeded if no master leads within `start_timeout_s`; ClusterError if the cluster cannot start."""
        timeout_s = self.start_timeout_s
        waiting = asyncio.ensure_future(event_within(self._led, timeout_s))
        try:
            await asyncio.wait((waiting, self.final), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self.final.done():
            self.final.result()
        if not self.url:
            msg = f"no master leads the cluster after {timeout_s:g} s; their logs are in {self.folder / 'logs'}"
            raise DeadlineExceeded(msg)
        return self.url

    async def wait(self) -> None:
        """Returns never: raises the error because of which the cluster cannot go on."""
        await self._until_final(None, lambda: "the cluster has ended")

    # ------------------------------------------------------------ what SupervisedProcesses asks for

    async def _start(self) -> None:
        if self.request.etcd is None:
            await self._start_etcd()
        self.etcd = self.etcd_access.connect()
        self._opened.push_async_callback(self.etcd.close)
        if self.request.etcd is None:  # leases in another one are not all of this host's members
            await revoke_all_leases(self.etcd, self._keys.prefix)
        self.run_beside(self._follow_leader())
        await self._start_masters()
        if self.request.hosts:
            await self._start_hosts()

    async def _start_masters(self) -> None:
        place = glob.escape(str(self.folder.absolute()))
        logs = json.dumps([f"{place}/host/logs", f"{place}/hosts/*/logs"])
        for number in range(1 + self.request.standbys):
            port = str(self.request.port if number == 0 else 0)
            settings = {"TRIREME_STORAGE": self.request.storage, "TRIREME_PORT": port, "TRIREME_LOGS": logs}
            settings |= self._port_file(number)
            await self._add("master", "master_service", settings)

    async def _start_hosts(self) -> None:
        """One agent for all places from the start; a launcher adds others when jobs need more."""
        if self.request.trainers + self.request.pservers:
            places = {"TRIREME_TRAINERS": self.request.trainers, "TRIREME_PSERVERS": self.request.pservers}
            await self._add_host("host", self.folder / "host", {name: str(count) for name, count in places.items()})
        self._size_with(LocalLauncher(self._add_hosts, self._remove_host), beside=True)

    def _size_with(self, launcher: Launcher, *, beside: bool) -> None:
        """The launcher starts more members when jobs need them. `beside`: the places from the start are not its own."""
        bounds = self.request.bounds(beside=beside)
        if any(each.most > each.least for each in bounds.values()):
            self.run_beside(PoolSize(launcher, bounds, self.leader, self._record).run())

    @asynccontextmanager
    async def leader(self) -> AsyncIterator[AsyncClient]:
        """Raises PeerError while there is none."""
        if not self.url:
            raise PeerError("no master leads the cluster yet")
        async with client_of(self.url, self.request.token, REQUEST_TIMEOUT_S) as leader:
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
        if self.request.etcd is not None:  # other hosts may be in the same pool
            name = socket.gethostname()
            host["TRIREME_NAME"] = name if role == "host" else f"{name}-{role}-{self._numbers[role]}"
        return await self._add(role, "trireme.host", {**settings, **host})

    async def _add(self, role: str, module: str, settings: Mapping[str, str]) -> Child:
        return await self._add_child(role, module, {**self._common_settings(), **settings, **self._extra})

    def _common_settings(self) -> dict[str, str]:
        """The settings that masters and host agents share."""
        return {
            **self.etcd_access.environment(),
            "TRIREME_HOST": self.request.host,
            "TRIREME_ADVERTISE": self.request.advertise,
            **self._token_settings(),
            "TRIREME_SOURCES": str(self.folder / "host" / "sources"),
            **{name: os.environ[name] for name in PASSED_ON if name in os.environ},
            **({"TRIREME_JOB_RETENTION_S": str(retention_s)} if (retention_s := self.request.job_retention_s) else {}),
        }

    def _token_settings(self) -> dict[str, str]:
        return self.request.tokens.environment() if self.request.tokens is not None else {}

    async def _is_over(self, child: Child, end: Exit) -> bool:
        """All are needed until the end."""
        del child, end
        return False

    async def _mourn(self, child: Child, end: Exit) -> None:
        """A standby leads at once. A host agent that starts again revokes the lease of the one before itself."""
        del end
        with contextlib.suppress(TriremeError, TimeoutError):  # etcd is away: the lease expires by itself
            async with asyncio.timeout(REVOKE_TIMEOUT_S):
                found = await self.etcd.get(self._keys.lock)
                lock = read_record(MasterLock, self._keys.lock, found.value) if found is not None else None
                if lock is not None and lock.master.startswith(f"{child.name}-"):
                    await self.etcd.revoke(lock.lease)

    async def _follow_leader(self) -> None:
        key = self._keys.address
        async for batch in self.etcd.watch(key):
            values = [kv.value for kv in batch.kvs] if batch.reset else []
            values += [event.kv.value for event in batch.events if event.type == "put"]
            for value in values:
                address = read_record(MasterAddress, key, value)
                if address is not None and address.url != self.url:
                    self.url = address.url
                    self._led.set()

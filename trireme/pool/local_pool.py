"""A cluster on this machine: etcd, masters and one host agent as supervised child processes. Jobs are submitted to its leader.

etcd ◄── master-0 … master-K      lead the jobs, one of them the cluster
  ▲──── host-0                    runs the members of the jobs, as the leader assigns them
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.errors import DeadlineExceeded, TriremeError
from shared.etcd import Etcd
from shared.etcd.reading import read_record
from shared.keys import ClusterKeys
from shared.membership.etcd_access import EtcdAccess
from shared.records import MasterAddress, MasterLock
from shared.runtime.waiting import event_within
from trireme.launch.child import Child, Exit
from trireme.launch.cluster import HOST
from trireme.launch.leases import REVOKE_TIMEOUT_S, revoke_all_leases
from trireme.launch.processes import spawn
from trireme.launch.supervision import GRACE_S, SupervisedProcesses
from trireme.view.child_events import ChildEvent

PASSED_ON = ("TRIREME_TRANSPORT", "TRIREME_REBALANCE_S", "TRIREME_LOG_LEVEL")
DRAIN_S = 20.0
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """`trainers`, `pservers`: places. `storage`: path or URL below which the files of jobs go. `etcd`: one that is there already;
    None: one of its own. `port`: of the first master (0: any free port). All listen at `host` and tell others `advertise` (default:
    `host`). `token`: for REST and between members."""

    trainers: int
    pservers: int
    storage: str
    token: str
    standbys: int = 0
    port: int = 0
    host: str = HOST
    advertise: str = ""
    etcd: EtcdAccess | None = None


class LocalPool(SupervisedProcesses[None]):
    """`folder` gets what SupervisedProcesses writes, and host/ with the logs of the jobs' members. `final` is an error if the cluster
    cannot go on. `environment`: of all children, over the rest."""

    # parameter servers of the host leave before its trainers; masters lead until all have left
    grace_s = {"host": 2 * DRAIN_S + 20.0, "master": GRACE_S}  # noqa: RUF012  never changed

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
    def etcd_access(self) -> EtcdAccess:
        return self.request.etcd or EtcdAccess((self.embedded.url,))

    async def leader_url(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """Raises DeadlineExceeded if no master leads within `timeout_s`; ClusterError if the cluster cannot start."""
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
        for number in range(1 + self.request.standbys):
            port = str(self.request.port if number == 0 else 0)
            await self._add("master", "master_service", {"TRIREME_STORAGE": self.request.storage, "TRIREME_PORT": port})
        places = {"TRIREME_TRAINERS": self.request.trainers, "TRIREME_PSERVERS": self.request.pservers}
        settings = {name: str(count) for name, count in places.items()}
        host = {"TRIREME_DATA_DIR": str(self.folder / "host"), "TRIREME_DRAIN_SECONDS": str(DRAIN_S)}
        if self.request.etcd is not None:  # other hosts may be in the same pool
            host["TRIREME_NAME"] = socket.gethostname()
        await self._add("host", "trireme.host", settings | host)

    async def _add(self, role: str, module: str, settings: Mapping[str, str]) -> Child:
        given = {
            **self.etcd_access.environment(),
            "TRIREME_HOST": self.request.host,
            "TRIREME_ADVERTISE": self.request.advertise,
            "TRIREME_TOKEN": self.request.token,
            "TRIREME_SOURCES": str(self.folder / "host" / "sources"),
            **{name: os.environ[name] for name in PASSED_ON if name in os.environ},
        }
        return await self._add_child(role, module, {**given, **settings, **self._extra})

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

"""A host of the pool: registers its places, follows what the leader assigns to them, and runs the processes.

    pool/<kind>/<name>-<kind>-<n>              written here: what the place runs (PlaceKeys in
                                               registration.py)
    pool/<kind>/<name>-<kind>-<n>/assignment   followed here: what it shall run (Place)

All children are forked from one process that has loaded torch, and die with this one, which has not. While
etcd is silent they go on. A child that lives on without its lease for too long is ended, and its place starts
another process: one watch for each job that has children here (trireme/launch/leases.py says what counts).

An error that one place or one job meets ends no other: what watches and follows goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import aiohttp

from trireme.launch.bounded_logs import HostLogs
from trireme.launch.leases import Vouching
from trireme.launch.processes import Child, ForkServer, inherited_environment
from trireme.launch.run_folder import sockets
from trireme.pool.frozen_children import FrozenChildren
from trireme.pool.host_status import HostMetrics, ProcessHealth
from trireme.pool.place import Host, Place
from trireme.pool.registration import HostFolder, PlaceKeys, opened_folder
from trireme.pool.settings import Settings, gpus, passed_on
from trireme_shared import __version__
from trireme_shared.platform.etcd import Etcd, KeyValue
from trireme_shared.platform.etcd.errors import UNUSABLE
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership.status_server import StatusServer
from trireme_shared.platform.runtime import http, ids, service, telemetry
from trireme_shared.platform.runtime.containment import Containment, LongLivedGroup
from trireme_shared.platform.runtime.limits import cores, memory_bytes
from trireme_shared.platform.security.private_files import told_of_sockets
from trireme_shared.protocol.errors import InvalidArgument, PeerError
from trireme_shared.protocol.keys import ClusterKeys
from trireme_shared.protocol.records.cluster import Assignment, Kind, PoolMember

CLAIM_S = 60.0  # longer than the lease of a dead agent of this name
# in the order in which they leave: trainers make the checkpoint that pservers wait for
KINDS: tuple[Kind, ...] = ("pserver", "trainer")
log = telemetry.logger("host_agent")


class HostAgent:
    """`run` it once."""

    def __init__(self, settings: Settings, etcd: Etcd) -> None:
        self.settings, self.etcd = settings, etcd
        self.keys = ClusterKeys(settings.root)
        self.places: list[Place] = []
        self.metrics = HostMetrics()
        self.url = ""  # of /healthz, /readyz and /metrics
        self._incarnation = ids.new_id(settings.name)

    def __repr__(self) -> str:
        return f"<HostAgent {self.settings.name}: {len(self.places)} places>"

    async def run(self, stopping: asyncio.Event) -> int:
        """Offer the places until `stopping`, then drain: 0. LEASE_LOST: another agent has taken a place.
        Raises Conflict, InvalidArgument, CallerError, PeerError."""
        settings = self.settings
        async with (
            http.session(tls=settings.tls.client()) as client,
            self._status(client).serving(settings.host, settings.port, settings.tls.server()) as port,
        ):
            self.url = f"{settings.tls.scheme}://{settings.advertised}:{port}"
            return await self._offer(stopping)

    def _status(self, client: aiohttp.ClientSession) -> StatusServer:
        processes = ProcessHealth(lambda: self.places, client)
        return StatusServer(self.settings.access, self.metrics, self.metrics.missing, processes.of_all)

    async def _offer(self, stopping: asyncio.Event) -> int:
        with contextlib.ExitStack() as opens:
            folder = opens.enter_context(opened_folder(self.settings.data_dir))
            forks = opens.enter_context(ForkServer())
            unix = opens.enter_context(sockets(folder.place))
            if told := told_of_sockets():
                log.info("sockets_elsewhere", told=told)
            await self._revoke(folder.last_lease)
            members = [self.member(kind, number) for kind in KINDS for number in range(self._count(kind))]
            if not members:
                raise InvalidArgument(
                    "a host without places is of no use: TRIREME_TRAINERS and TRIREME_PSERVERS are 0"
                )
            keys = PlaceKeys(self.etcd, self.keys, members, self.settings.agent_ttl_s, folder.note_lease)
            host = self._host(folder, forks, f"{unix.path}/")
            self.places = [Place(member, host, self.reporter(keys, member)) for member in members]
            self.metrics.places, self.metrics.members = self.places, keys.records.values()
            await keys.claim(CLAIM_S)
            self.metrics.registration = keys
            log.info(
                "registered",
                host=self.settings.name,
                url=self.url,
                **{kind: self._count(kind) for kind in KINDS},
            )
            service.ready()
            forks.prepare()
            service.settled()
            return await self.serve(host, keys, unix.keep, stopping)

    async def serve(
        self,
        host: Host,
        keys: PlaceKeys,
        keep_sockets: Callable[[], Awaitable[None]],
        stopping: asyncio.Event,
    ) -> int:
        """As `run`, from the registration on."""
        async with LongLivedGroup() as group:
            keep = Containment(UNUSABLE).keep
            parts: dict[str, Callable[[], Awaitable[None]]] = {
                f"following {kind}s": partial(self._follow, kind) for kind in KINDS if self._count(kind)
            }
            parts["watching leases"] = FrozenChildren(host, self.places).run
            parts["keeping sockets"] = keep_sockets
            parts["vouching for children"] = partial(Vouching(host.etcd).run, self._children)
            parts["keeping logs in bounds"] = self._logs(host).run
            beside = [group.create_task(keep(part, what)) for what, part in parts.items()]
            holding = group.create_task(keep(keys.hold, "keeping the places registered"))
            asked = group.create_task(stopping.wait())
            running = [(place.kind, group.create_task(place.run())) for place in self.places]
            await asyncio.wait((holding, asked), return_when=asyncio.FIRST_COMPLETED)
            for kind in KINDS:
                for place in self.places:
                    if place.kind == kind:
                        keys.set(self.keys.member(kind, place.member), draining=True)
                        place.close()
                await asyncio.gather(*(task for each, task in running if each == kind))
            await keys.release()
            for task in (*beside, holding, asked):
                task.cancel()
        return 0 if stopping.is_set() else service.LEASE_LOST

    # ------------------------------------------------------------ parts

    def _children(self) -> dict[str, Child]:
        """Of the members of jobs that run here."""
        children = {place.member: place.child for place in self.places if place.child is not None}
        return {member: child for member, child in children.items() if child.alive}

    def _logs(self, host: Host) -> HostLogs:
        async def exists(job: str) -> bool:
            return bool((await self.etcd.range(self.keys.job(job), count_only=True)).count)

        def written() -> list[Path]:
            return [place.child.log for place in self.places if place.child is not None]

        most = {"log_bytes": self.settings.log_bytes, "logs_bytes": self.settings.logs_bytes}
        return HostLogs(host.folder.logs, exists, written, **most)

    def _count(self, kind: Kind) -> int:
        return self.settings.trainers if kind == "trainer" else self.settings.pservers

    @property
    def _cores(self) -> int:
        return self.settings.cores or cores()

    def member(self, kind: Kind, number: int) -> PoolMember:
        places = self.settings.trainers + self.settings.pservers
        return PoolMember(
            member=f"{self.settings.name}-{kind}-{number}",
            kind=kind,
            host=self.settings.node or socket.gethostname(),
            agent=self.settings.name,
            pid=os.getpid(),
            url=self.url,
            incarnation=self._incarnation,
            cores=max(1, self._cores // places),
            memory_bytes=memory_bytes() // places,
            device="cuda" if kind == "trainer" and gpus() else "cpu",
            trireme_version=__version__,
        )

    def _host(self, folder: HostFolder, forks: ForkServer, uds: str) -> Host:
        places = self.settings.trainers + self.settings.pservers
        environment = {
            **inherited_environment(),
            "TRIREME_UDS": uds,
            "TRIREME_THREADS": str(max(1, self._cores // places)),
            **passed_on(os.environ),
            "TRIREME_DRAIN_SECONDS": str(self.settings.drain_seconds),
            "TRIREME_SOURCES": str(folder.sources),
        }
        return Host(
            self.settings.name,
            self.etcd,
            self.keys,
            folder,
            environment,
            forks.start,
            self.settings.drain_seconds,
        )

    def reporter(self, keys: PlaceKeys, member: PoolMember) -> Callable[..., None]:
        key = self.keys.member(member.kind, member.member)
        return lambda **fields: keys.set(key, **fields)

    async def _revoke(self, lease: int) -> None:
        """Of the agent before, which is dead."""
        if lease:
            with contextlib.suppress(PeerError):
                await self.etcd.revoke(lease)

    async def _follow(self, kind: Kind) -> None:
        """The assignments of the places of that kind."""
        places = {place.member: place for place in self.places if place.kind == kind}
        async for batch in self.etcd.watch(
            self.keys.member(kind, f"{self.settings.name}-{kind}-"), prefix=True
        ):
            if batch.reset:
                self._replace(places, batch.kvs)
            for event in batch.events:
                if (place := self._place_of(places, event.kv.key)) is not None:
                    place.assign(_assignment(event.kv) if event.type == "put" else None)

    def _replace(self, places: dict[str, Place], found: Sequence[KeyValue]) -> None:
        given = {
            place.member: _assignment(kv)
            for kv in found
            if (place := self._place_of(places, kv.key)) is not None
        }
        for member, place in places.items():
            place.assign(given.get(member))

    def _place_of(self, places: dict[str, Place], key: str) -> Place | None:
        """The place that a key is the assignment of."""
        found = self.keys.member_of(key)
        return places.get(found[1]) if found is not None and found[2] else None


def _assignment(kv: KeyValue) -> Assignment | None:
    return read_record(Assignment, kv.key, kv.value)

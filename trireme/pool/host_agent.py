"""A host of the pool: registers its places, follows what the leader assigns to them, and runs the processes.

    pool/<kind>/<name>-<kind>-<n>              written here: what the place runs (PlaceKeys in place.py)
    pool/<kind>/<name>-<kind>-<n>/assignment   followed here: what it shall run (Place)

All children are forked from one process that has loaded torch, and die with this one, which has not. While etcd is silent they go on.
A child that lives on without its lease for too long is ended, and its place starts another process: one watch for each job that has
children here (trireme/launch/leases.py says what counts).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import aiohttp
import psutil

from trireme.launch.leases import LostLeases, Vouching
from trireme.launch.processes import Child, ForkServer, cores, inherited_environment
from trireme.launch.run_folder import sockets
from trireme.pool.host_status import HostMetrics, ProcessHealth
from trireme.pool.place import Host, HostFolder, Place, PlaceKeys, opened_folder
from trireme.pool.settings import Settings, gpus, passed_on
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership.status_server import StatusServer
from trireme_shared.platform.runtime import http, ids, service, telemetry
from trireme_shared.protocol.errors import InvalidArgument, PeerError, TriremeError
from trireme_shared.protocol.keys import ClusterKeys, Keys
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.cluster import Assignment, Kind, PoolMember

if TYPE_CHECKING:
    from trireme_shared.platform.etcd import KeyValue

CLAIM_S = 60.0  # longer than the lease of a dead agent of this name
KINDS: tuple[Kind, ...] = (
    "pserver",
    "trainer",
)  # in the order in which they leave: trainers make the checkpoint that pservers wait for
LOOK_S = 1.0

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
        """Offer the places until `stopping`, then drain: 0. LEASE_LOST: another agent has taken a place. Raises Conflict, InvalidArgument,
        CallerError, PeerError."""
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
            uds = str(opens.enter_context(sockets(folder.place)))
            await self._revoke(folder.last_lease)
            members = [self._member(kind, number) for kind in KINDS for number in range(self._count(kind))]
            if not members:
                raise InvalidArgument("a host without places is of no use: TRIREME_TRAINERS and TRIREME_PSERVERS are 0")
            keys = PlaceKeys(self.etcd, self.keys, members, self.settings.agent_ttl_s, folder.note_lease)
            host = self._host(folder, forks, uds)
            self.places = [Place(member, host, self._reporter(keys, member)) for member in members]
            self.metrics.places, self.metrics.members = self.places, keys.records.values()
            await keys.claim(CLAIM_S)
            self.metrics.registration = keys
            log.info("registered", host=self.settings.name, url=self.url, **{kind: self._count(kind) for kind in KINDS})
            service.ready()
            forks.prepare()
            service.settled()
            return await self._serve(host, keys, stopping)

    async def _serve(self, host: Host, keys: PlaceKeys, stopping: asyncio.Event) -> int:
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(self._follow(kind)) for kind in KINDS if self._count(kind)]
            beside.append(group.create_task(FrozenChildren(host, self.places).run()))
            beside.append(group.create_task(Vouching(host.etcd).run(self._children)))
            holding = group.create_task(keys.hold())
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

    def _count(self, kind: Kind) -> int:
        return self.settings.trainers if kind == "trainer" else self.settings.pservers

    @property
    def _cores(self) -> int:
        return self.settings.cores or cores()

    def _member(self, kind: Kind, number: int) -> PoolMember:
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
            memory_bytes=psutil.virtual_memory().total // places,
            device="cuda" if kind == "trainer" and gpus() else "cpu",
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

    def _reporter(self, keys: PlaceKeys, member: PoolMember) -> Callable[..., None]:
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
        async for batch in self.etcd.watch(self.keys.member(kind, f"{self.settings.name}-{kind}-"), prefix=True):
            if batch.reset:
                self._replace(places, batch.kvs)
            for event in batch.events:
                if (place := self._place_of(places, event.kv.key)) is not None:
                    place.assign(_assignment(event.kv) if event.type == "put" else None)

    def _replace(self, places: dict[str, Place], found: Sequence[KeyValue]) -> None:
        given = {place.member: _assignment(kv) for kv in found if (place := self._place_of(places, kv.key)) is not None}
        for member, place in places.items():
            place.assign(given.get(member))

    def _place_of(self, places: dict[str, Place], key: str) -> Place | None:
        """The place that a key is the assignment of."""
        found = self.keys.member_of(key)
        return places.get(found[1]) if found is not None and found[2] else None


def _assignment(kv: KeyValue) -> Assignment | None:
    return read_record(Assignment, kv.key, kv.value)


class FrozenChildren:
    """`places`: all of the host."""

    def __init__(self, host: Host, places: Sequence[Place]) -> None:
        self._host, self._places = host, places

    def __repr__(self) -> str:
        return f"<FrozenChildren of {self._host.name}>"

    async def run(self) -> None:
        """Until cancelled."""
        watches: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                jobs = {place.job for place in self._places if place.child is not None}
                for job in watches.keys() - jobs:
                    watches.pop(job).cancel()
                for job in jobs - watches.keys():
                    watches[job] = group.create_task(self._watch(job))
                await asyncio.sleep(LOOK_S)

    async def _watch(self, job: str) -> None:
        keys = Keys(job, self._host.keys.root)
        lost = LostLeases(await self._lease_ttl_s(keys))
        await lost.follow(self._host.etcd, keys, self._alive_in(job), partial(self._end, lost), f"{self._host.name}-")

    async def _lease_ttl_s(self, keys: Keys) -> float:
        """Of the job's members, from its spec."""
        while True:
            try:
                found = await self._host.etcd.get(keys.spec)
                spec = read_record(JobSpec, found.key, found.value) if found is not None else None
                if spec is not None:
                    return spec.lease_ttl_s
            except TriremeError as error:
                log.debug("etcd_away", key=keys.spec, cause=str(error))
            await asyncio.sleep(LOOK_S)

    def _alive_in(self, job: str) -> Callable[[], dict[str, int]]:
        def alive() -> dict[str, int]:
            return {
                place.short_name: place.child.pid
                for place in self._places
                if place.job == job and place.child is not None and place.child.alive
            }

        return alive

    def _end(self, lost: LostLeases, name: str) -> None:
        for place in self._places:
            if place.short_name == name and place.child is not None:
                pid, loss = place.child.pid, lost.ended(place.child.pid)
                log.warning("child_lost_its_lease", member=place.member, pid=pid, cause=str(loss))
                if loss is not None and loss.stopped:
                    place.child.pardon()
                place.child.send(signal.SIGKILL)

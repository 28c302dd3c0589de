"""Host agents in virtual time: the product's own places, their keys, and members that hold their own keys in
the job.

A host is a client of etcd of its own, so it can be cut off. A member here has an index and a lease, and no
parameters.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal as signals
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import count
from pathlib import Path
from typing import IO

from pserver_service.context import OwnIndex, own_number
from tests.equipment.virtual_loop import Process
from tests.simulation.many_jobs import SimulatedJobs
from trainer_agent.membership.lease import Membership
from trireme.pool.place import Host as PlacesOfHost
from trireme.pool.place import Place
from trireme.pool.registration import HostFolder, PlaceKeys
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.runtime import ids, service
from trireme_shared.platform.runtime.service import READY_FILE
from trireme_shared.protocol.keys import ClusterKeys, Keys
from trireme_shared.protocol.records import PserverMember, TrainerMember
from trireme_shared.protocol.records.cluster import Assignment, Kind, PoolMember

KINDS: tuple[Kind, ...] = ("pserver", "trainer")
START_S = 0.3  # of a member
PIDS = count(1001)


class SimulatedMember:
    """A process of a job: a parameter server that wants an index, or a trainer. As
    trireme/launch/processes.py has it."""

    def __init__(self, etcd: Etcd, job: str, kind: Kind, name: str, ttl_s: float, ready: Path) -> None:
        self.pid, self.returncode, self.job, self.name = next(PIDS), None, job, name
        self.key: OwnIndex | Membership | None = None
        self._etcd, self._kind, self._ttl_s, self._ready = etcd, kind, ttl_s, ready
        self._stopping, self._ended = asyncio.Event(), asyncio.Event()
        self.process = Process(name)
        self.process.spawn(self._run())

    @property
    def index(self) -> int | None:
        """That it may act on now."""
        if self.returncode is not None or not isinstance(self.key, OwnIndex) or not self.key.key:
            return None
        return None if self.key.in_doubt else self.key.record.index

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signal: int, /) -> None:
        if signal == signals.SIGKILL:
            self.process.kill()
            self._end(-signals.SIGKILL)
        else:
            self._stopping.set()

    def _end(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = code
            self._ended.set()

    async def _run(self) -> None:
        await asyncio.sleep(START_S)
        keys, incarnation = Keys(self.job), ids.new_id(self.name)
        common = {"incarnation": incarnation, "url": f"http://{self.name}", "host": "h", "pid": self.pid}
        directory = Directory(self._etcd, keys)
        following = asyncio.ensure_future(directory.run())
        stopped = asyncio.ensure_future(self._stopping.wait())
        if self._kind == "pserver":
            claiming = asyncio.ensure_future(self._claim(directory, PserverMember(index=-1, **common)))
        else:
            claiming = asyncio.ensure_future(
                self._register(keys, TrainerMember(trainer=incarnation, **common))
            )
        self._ready.touch()
        await asyncio.wait((claiming, stopped), return_when=asyncio.FIRST_COMPLETED)
        if self.key is not None:
            holding = asyncio.ensure_future(self.key.hold())
            await asyncio.wait((holding, stopped), return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                await self.key.release()
        code = 0 if self._stopping.is_set() else service.LEASE_LOST
        following.cancel()
        self._end(code)

    async def _claim(self, directory: Directory, record: PserverMember) -> None:
        key = OwnIndex(self._etcd, directory, record, own_number(self.name))
        await key.claim_index(3600)
        self.key = key

    async def _register(self, keys: Keys, record: TrainerMember) -> None:
        key = Membership(self._etcd, record)
        await key.register(keys, self._ttl_s)
        self.key = key


class SimulatedHost:
    """`agent_ttl_s`, `lease_ttl_s`: of the agent's keys and of a trainer's."""

    def __init__(
        self,
        jobs: SimulatedJobs,
        name: str,
        folder: Path,
        *,
        agent_ttl_s: float = 2.0,
        lease_ttl_s: float = 3.0,
    ) -> None:
        self.name, self.members = name, list[SimulatedMember]()
        self._jobs, self._folder, self._keys = jobs, HostFolder(folder), ClusterKeys()
        self._agent_ttl_s, self._lease_ttl_s = agent_ttl_s, lease_ttl_s
        self._etcd = jobs.etcd_of(name)
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    # ------------------------------------------------------------ faults

    def start(self) -> None:
        """Its agent, again after `kill`."""
        self._agent = Process(self.name)
        self._jobs.others.append(self._agent)
        self._agent.spawn(self._run())

    def kill(self) -> None:
        """The agent, and its children with it."""
        self._agent.kill()
        for member in self.members:
            member.send_signal(signals.SIGKILL)

    def cut(self) -> None:
        self._jobs.simulated.cut(self.name)

    def join(self) -> None:
        self._jobs.simulated.mend(self.name)

    # ------------------------------------------------------------ what runs

    def running(self, kind: Kind) -> list[SimulatedMember]:
        return [each for each in self.members if each.returncode is None and f"-{kind}-" in each.name]

    async def _run(self) -> None:
        if self._folder.last_lease:
            await self._etcd.revoke(self._folder.last_lease)
        incarnation = ids.new_id(self.name)
        members = [
            PoolMember(
                member=f"{self.name}-{kind}-0",
                kind=kind,
                host=self.name,
                agent=self.name,
                pid=1,
                incarnation=incarnation,
            )
            for kind in KINDS
        ]
        keys = PlaceKeys(self._etcd, self._keys, members, self._agent_ttl_s, self._folder.note_lease)
        host = PlacesOfHost(self.name, self._etcd, self._keys, self._folder, {}, self._start, 5.0)
        places = {}
        for member in members:
            key = self._keys.member(member.kind, member.member)
            places[key] = Place(member, host, lambda key=key, **fields: keys.set(key, **fields))
        await keys.claim(60.0)
        async with asyncio.TaskGroup() as group:
            group.create_task(keys.hold())
            for key, place in places.items():
                group.create_task(place.run())
                group.create_task(self._follow(f"{key}/assignment", place))

    async def _follow(self, key: str, place: Place) -> None:
        async with aclosing(self._etcd.watch(key)) as batches:
            async for batch in batches:
                values = [kv.value for kv in batch.kvs] if batch.reset else []
                values += [event.kv.value if event.type == "put" else b"" for event in batch.events]
                place.assign(read_record(Assignment, key, values[-1]) if values and values[-1] else None)

    async def _start(
        self, argv: Sequence[str], environment: Mapping[str, str], out: IO[bytes], err: IO[bytes]
    ) -> SimulatedMember:
        name, ready = environment["TRIREME_NAME"], Path(environment[READY_FILE])
        kind: Kind = "pserver" if "-pserver-" in name else "trainer"
        etcd = self._jobs.etcd_of(self.name)
        member = SimulatedMember(etcd, environment["TRIREME_JOB"], kind, name, self._lease_ttl_s, ready)
        self.members.append(member)
        self._jobs.others.append(member.process)
        return member


def held_twice(hosts: Sequence[SimulatedHost]) -> list[str]:
    """Indices that two processes may act on at this moment."""
    held = Counter(
        (member.job, member.index)
        for host in hosts
        for member in host.running("pserver")
        if member.index is not None
    )
    return [
        f"index {index} of {job} is held by {count} processes"
        for (job, index), count in held.items()
        if count > 1
    ]


@contextlib.contextmanager
def watched(hosts: Sequence[SimulatedHost], broken: list[str]) -> Iterator[None]:
    """Looks for `held_twice` all the time."""

    async def look() -> None:
        while True:
            broken.extend(held_twice(hosts))
            await asyncio.sleep(0.01)

    looking = asyncio.ensure_future(look())
    try:
        yield
    finally:
        looking.cancel()

"""The state of a running local job, read from etcd, its master's REST API and its parameter servers (collective: its trainers)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

from trainer_agent.data_plane.http import HttpPserver
from trireme.cli.targets import token_of_run
from trireme.launch import run_folder
from trireme.view.job_address import OpenJob, open_job
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.membership.etcd_access import EtcdAccess
from trireme_shared.platform.security.tls import client_context
from trireme_shared.protocol.errors import PeerError
from trireme_shared.protocol.events import EventRecord
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import Dispatch, JobState, Mode, PserverMember, Strategy, TrainerMember
from trireme_shared.protocol.records.checkpoints import CheckpointLatest

ANSWER_S = 2.0
STALL_S = 0.5
SETTLE_S = 3.0
RETRY_S = 0.1


class JobProbe:
    """Reads the job that runs in `folder`. Use `async with`: a task follows etcd meanwhile. Make a new probe after the launcher was
    started again.

    `directory`: the job's keys in etcd, followed all the time. `etcd`, `keys`: for what the directory does not follow. `stall_s`: how
    long a member that says nothing is asked for its version.
    """

    def __init__(self, folder: Path, stall_s: float = STALL_S) -> None:
        facts = json.loads((folder / run_folder.RUN_FILE).read_text(encoding="utf-8"))
        self.folder = folder
        self.job = str(facts["job"])
        self.keys = Keys(self.job)
        self.etcd = EtcdAccess.from_facts(facts).connect()
        self.directory = Directory(self.etcd, self.keys)
        self._url = str(facts["url"])
        self._token = token_of_run(folder)
        self._stall_s = stall_s
        self._pservers: dict[str, HttpPserver] = {}
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._following = self._tasks.create_task(self.directory.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._following.cancel()
        if not isinstance(error, asyncio.CancelledError):
            kind = error = traceback = None  # the group would wrap it; it leaves the block as it is
        try:
            await self._tasks.__aexit__(kind, error, traceback)
        finally:
            for pserver in self._pservers.values():
                await pserver.close()
            await self.etcd.close()

    @property
    def state(self) -> JobState:
        """The last known one while etcd is away."""
        return self.directory.state or JobState()

    @property
    def mode(self) -> Mode:
        return self.directory.spec.mode if self.directory.spec is not None else Mode.SYNC

    @property
    def is_masterless(self) -> bool:
        return self.directory.spec is not None and self.directory.spec.dispatch is Dispatch.ETCD

    async def leader(self) -> str:
        """Id of the leading master. Raises PeerError, DeadlineExceeded."""
        await self.directory.wait_for(lambda view: view.master is not None, SETTLE_S, "a master")
        async with self._open() as (client, job):
            return (await client.get_job(job)).master.master_id

    async def missing(self) -> int:
        """How many trainers and parameter servers the job still lacks; 1 while no master answers."""
        try:
            async with self._open() as (client, job):
                members = (await client.get_job(job)).members
        except PeerError:
            return 1
        return max(0, members.trainers_desired - members.trainers) + max(0, members.pservers_desired - members.pservers)

    async def versions(self) -> tuple[int, int] | None:
        """(lowest, highest) version over all blocks; None while a parameter server is away or restoring. Collective: of the listed trainers."""
        try:
            members = await self._serving()
            infos = await asyncio.gather(*(self._pserver(member).info() for member in members))
        except PeerError:
            return None
        if not infos:
            return None
        if not all(info.ready and info.timeline == self.state.timeline for info in infos):
            return None
        if infos[0].mode is Mode.ASYNC:
            updates = sum(info.updates for info in infos)
            return updates, updates
        filled = [info for info in infos if info.blocks]
        return min(info.lowest for info in filled), max(info.highest for info in filled)

    async def _serving(self) -> list[PserverMember]:
        """The members that hold the parameters; empty while one of them is away. Raises PeerError."""
        if self.directory.spec is None or self.directory.spec.strategy is not Strategy.COLLECTIVE:
            found = self.directory.pservers
            return list(found.values()) if len(found) == self.directory.pservers_desired else []
        keys = await self.etcd.range(self.keys.trainers, prefix=True, timeout_s=ANSWER_S)
        records = [read_record(TrainerMember, kv.key, kv.value) for kv in keys.kvs if self.keys.is_trainer(kv.key)]
        there = {each.trainer: each for each in records if each is not None and each.exchange is not None}
        names = self.directory.trainers.names
        return [_as_pserver(there[name]) for name in names] if there.keys() >= set(names) else []

    def _pserver(self, member: PserverMember) -> HttpPserver:
        if member.incarnation not in self._pservers:
            self._pservers[member.incarnation] = HttpPserver(
                member, self._token, tls=client_context(), stall_s=self._stall_s
            )
        return self._pservers[member.incarnation]

    async def revision(self) -> int:
        """The newest revision in etcd; the directory's last one if etcd is away."""
        with contextlib.suppress(PeerError):
            return (await self.etcd.range(self.keys.state, timeout_s=ANSWER_S)).revision
        return self.directory.revision

    async def checkpoint_step(self) -> int | None:
        """The step of the checkpoint that the job's timeline began with; None: not known."""
        with contextlib.suppress(PeerError):
            found = await self.etcd.get(self.keys.latest, timeout_s=ANSWER_S)
            latest = read_record(CheckpointLatest, self.keys.latest, found.value if found else None)
            kept = latest.kept if latest else ()
            return next((ref.step for ref in kept if ref.uuid == self.state.checkpoint), None)
        return None

    async def discarded_records(self) -> int:
        """Records of discarded tasks; 0 while no master answers."""
        for _ in range(int(SETTLE_S / RETRY_S)):
            with contextlib.suppress(PeerError):
                async with self._open() as (client, job):
                    return sum([task.count async for task in client.list_tasks(job, state="DISCARDED")])
            await asyncio.sleep(RETRY_S)
        return 0

    async def events(self, after: int) -> list[EventRecord]:
        """The master's events with a number above `after`; as many as it answers for."""
        found: list[EventRecord] = []
        with contextlib.suppress(PeerError):
            async with self._open() as (client, job):
                while page := (await client.list_events(job, after=after)).events:
                    found += page
                    after = page[-1].event_id
        return found

    def _open(self) -> AbstractAsyncContextManager[OpenJob]:
        """Raises PeerError while no master leads."""
        if self.is_masterless:
            return open_job(self._url, timeout_s=ANSWER_S)
        if self.directory.master is None:
            raise PeerError("there is no master right now")
        return open_job(self.directory.master.url, token=self._token, timeout_s=ANSWER_S)


def _as_pserver(trainer: TrainerMember) -> PserverMember:
    """The trainer as a parameter server, because it answers the same requests."""
    assert trainer.exchange is not None
    where = {name: getattr(trainer, name) for name in ("incarnation", "host", "pid", "network")}
    return PserverMember(index=0, url=trainer.exchange.url, uds=trainer.exchange.uds, **where)

"""A whole job in one event loop: simulated etcd, and the real master, parameter servers and agents with torch, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from master_service.leadership.master import Master
from pserver_service.pserver import Pserver
from shared.errors import PeerError
from shared.etcd import Etcd
from shared.keys import Keys
from shared.membership.directory import Directory
from shared.records import JobSpec, JobState, Phase, PserverMember, TrainerMember
from shared.wire.messages import PullEnd
from tests.equipment.etcd.simulated import SimulatedEtcd
from trainer_agent.agent import Agent
from trainer_agent.model.torch_compute import TorchCompute
from trainer_agent.script.user_module import load


class InProcess:
    """trainer_agent.data_plane.http.PserverPort, straight into a Pserver; what travels is a copy."""

    def __init__(self, pserver: Pserver) -> None:
        self._pserver = pserver

    async def init(self, header, blocks):
        await self._pserver.init(header, self._copied(blocks))

    async def push(self, header, blocks):
        return await self._pserver.push(header, self._copied(blocks))

    async def pull(self, request, sink, placed=None):
        async with aclosing(self._pserver.pull(request)) as items:
            async for item in items:
                if isinstance(item, PullEnd):
                    return item
                block, payload = item
                sink(block)[:] = payload
                if placed is not None:
                    placed(block)
        raise AssertionError("a pull ended without PullEnd")

    async def info(self):
        return await self._pserver.info()

    async def ledger(self, query):
        return await self._pserver.ledger(query)

    @staticmethod
    async def _copied(blocks) -> AsyncIterator[Any]:
        async for item, payload in blocks:
            await asyncio.sleep(0)
            yield item, bytearray(payload)


class MasterPort:
    """trainer_agent.tasks.source.MasterPort, straight into a Master; `away`: it does not answer."""

    def __init__(self, master: Master) -> None:
        self._master = master
        self.away = False

    def __getattr__(self, name):
        async def call(*arguments):
            if self.away:
                raise PeerError("the master is away")
            return await getattr(self._master, name)(*arguments)

        return call


class Cluster:
    """`async with cluster(spec)`; trainers are added and killed by name."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec, self.keys = spec, Keys(spec.job)
        self.store = SimulatedEtcd()
        self.etcd = Etcd(self.store.transport("test"))
        self.directory = Directory(self.etcd, self.keys)
        self.pservers = [Pserver(spec.job, f"pserver-{index}-x", index) for index in range(spec.pservers)]
        self.master = Master(self.etcd, self.keys, name="master-0", url="http://127.0.0.1:1", spec=spec)
        self.port = MasterPort(self.master)
        self.computes: dict[str, TorchCompute] = {}
        self.running: dict[str, asyncio.Task[int]] = {}
        self.stopping: dict[str, asyncio.Event] = {}
        self._computing = ThreadPoolExecutor(1)
        """One for all: torch's random numbers belong to the process, and a forward pass must not be interrupted."""
        self._reading = ThreadPoolExecutor(1)

    async def start(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._background = [
            group.create_task(self.directory.run()),
            group.create_task(self.master.run(asyncio.Event())),
        ]
        for pserver in self.pservers:
            member = PserverMember(index=pserver.index, url="", incarnation=pserver.incarnation, host="here", pid=1)
            await self.etcd.put(self.keys.pserver(pserver.index), member.to_bytes())

    async def stop(self) -> None:
        for task in [*self.running.values(), *self._background]:
            task.cancel()
        await asyncio.wait([*self.running.values(), *self._background])
        self._computing.shutdown()
        self._reading.shutdown()

    def add_trainer(self, name: str, script: Path | None = None) -> Agent:
        user = load(script or self.spec.script)
        compute = self._computing.submit(TorchCompute, user, self.spec, self._computing).result()

        async def offload(work, *arguments):
            return await asyncio.get_running_loop().run_in_executor(self._reading, work, *arguments)

        self.stopping[name] = asyncio.Event()
        agent = Agent(
            self.spec,
            TrainerMember(trainer=name, url="http://127.0.0.1:1", incarnation=name, host="here", pid=1),
            etcd=Etcd(self.store.transport(name)),
            directory=self.directory,
            compute=compute,
            master=self.port,
            connect=lambda member: InProcess(self.pservers[member.index]),
            offload=offload,
            stopping=self.stopping[name],
        )
        self.computes[name] = compute
        self.running[name] = self._group.create_task(self._outcome(agent))
        return agent

    async def _outcome(self, agent: Agent) -> Any:
        try:
            return await agent.run()
        except Exception as error:  # a process's end, looked at by the test
            return error

    async def kill(self, name: str) -> None:
        """As SIGKILL: it says nothing more, and its key vanishes."""
        self.running[name].cancel()
        await asyncio.wait([self.running.pop(name)])
        await self.etcd.delete(self.keys.trainer(name))

    async def ended(self, limit_s: float = 50.0) -> JobState:
        await self.directory.wait_for(
            lambda view: view.state is not None and view.state.phase.final, limit_s, "the end of the job"
        )
        assert self.directory.state is not None
        return self.directory.state

    async def version(self, version: int, limit_s: float = 50.0) -> None:
        """Wait until all parameter servers have reached `version`."""
        async with asyncio.timeout(limit_s):
            while min(pserver.store.lowest if pserver.store else -1 for pserver in self.pservers) < version:
                await asyncio.sleep(0.001)

    def exported(self) -> dict[str, torch.Tensor]:
        loaded: dict[str, torch.Tensor] = torch.load(f"{self.spec.storage}/export/model.pt", weights_only=True)
        return loaded


@asynccontextmanager
async def cluster(spec: JobSpec, trainers: int = 0) -> AsyncIterator[Cluster]:
    async with asyncio.TaskGroup() as group:
        made = Cluster(spec)
        await made.start(group)
        try:
            for number in range(trainers):
                made.add_trainer(f"trainer-{number}-x")
            yield made
        finally:
            await made.stop()


async def trained(spec: JobSpec, trainers: int = 1) -> dict[str, torch.Tensor]:
    """Run a job to its end; the exported state_dict."""
    async with cluster(spec, trainers) as made:
        state = await made.ended()
        assert state.phase is Phase.COMPLETED, state
        return made.exported()

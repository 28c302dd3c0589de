"""A whole job in one event loop: simulated etcd, and the real master, parameter servers and agents with
torch, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from master_service.leadership.master import Master
from tests.equipment.cluster.cluster import Cluster
from tests.equipment.cluster.direct_ports import DirectMaster, DirectPserver
from trainer_agent.agent import Agent, AgentPorts
from trainer_agent.model.torch_compute import TorchCompute
from trainer_agent.script.user_module import load
from trireme_shared.blocks.gradient_norm import Clipping
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.protocol.records import JobSpec, JobState, Phase, PserverMember, TrainerMember
from trireme_shared.serving.pserver import Pserver


class TorchCluster(Cluster):
    """`async with cluster(spec)`; trainers are added and killed by name."""

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        self.directory = Directory(self.etcd, self.keys)
        self.pservers = [Pserver(spec.job, f"pserver-{index}-x", index) for index in range(spec.pservers)]
        for pserver in self.pservers:
            pserver.clipping = Clipping.of(spec)
        self.master: Master = self.make_master("master", "master-0", "http://127.0.0.1:1")
        self.port = DirectMaster(self.master)
        self.computes: dict[str, TorchCompute] = {}
        self.running: dict[str, asyncio.Task[int]] = {}
        self.stopping: dict[str, asyncio.Event] = {}
        self._master_stopping = asyncio.Event()
        self._computing = ThreadPoolExecutor(1)
        """One for all: torch's random numbers belong to the process, and a forward pass must not be
        interrupted."""
        self._reading = ThreadPoolExecutor(1)

    async def start(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._background = [
            group.create_task(self.directory.run()),
            group.create_task(self.master.run(self._master_stopping)),
        ]
        for pserver in self.pservers:
            member = PserverMember(
                index=pserver.index, url="", incarnation=pserver.incarnation, host="here", pid=1
            )
            await self.etcd.put(self.keys.pserver(pserver.index), member.to_bytes())
            start_rows = self.make_pserver(
                pserver, "", self.etcd, self.offload, self.directory
            ).member.start_rows
            pserver.start_rows = start_rows
            self._background.append(group.create_task(start_rows.run()))

    async def stop(self) -> None:
        for task in [*self.running.values(), *self._background]:
            task.cancel()
        await asyncio.wait([*self.running.values(), *self._background])
        for compute in self.computes.values():
            compute.close()
        self._computing.shutdown()
        self._reading.shutdown()

    def add_trainer(self, name: str, script: Path | None = None) -> Agent:
        compute = self._computing.submit(self.built, script or Path(self.spec.script)).result()
        self.stopping[name] = asyncio.Event()
        member = TrainerMember(trainer=name, url="http://127.0.0.1:1", incarnation=name, host="here", pid=1)
        ports = AgentPorts(
            etcd=self.etcd_of(name),
            directory=self.directory,
            master=self.port,
            connect=lambda member: DirectPserver(self.pservers[member.index]),
            offload=self.offload,
        )
        agent = Agent(self.spec, member, compute, ports, self.stopping[name])
        self.computes[name] = compute
        self.running[name] = self._group.create_task(self._outcome(agent))
        return agent

    def built(self, script: Path) -> TorchCompute:
        """In the thread that computes, as in a process of its own: some settings of torch belong to the
        thread."""
        return TorchCompute(load(script), self.spec, self._computing)

    async def offload(self, work, *arguments):
        return await asyncio.get_running_loop().run_in_executor(self._reading, work, *arguments)

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

    async def stop_master(self) -> None:
        """For good; it gives up its lease."""
        self._master_stopping.set()
        await asyncio.wait([self._background[1]])

    async def version(self, version: int, limit_s: float = 50.0) -> None:
        """Wait until all parameter servers have reached `version`."""
        async with asyncio.timeout(limit_s):
            while min(pserver.store.lowest if pserver.store else -1 for pserver in self.pservers) < version:
                await asyncio.sleep(0.001)

    def exported(self) -> dict[str, torch.Tensor]:
        loaded: dict[str, torch.Tensor] = torch.load(
            f"{self.spec.storage}/export/model.pt", weights_only=True
        )
        return loaded


@asynccontextmanager
async def cluster(spec: JobSpec, trainers: int = 0) -> AsyncIterator[TorchCluster]:
    async with asyncio.TaskGroup() as group:
        made = TorchCluster(spec)
        await made.start(group)
        try:
            for number in range(trainers):
                made.add_trainer(f"trainer-{number}-x")
            yield made
        finally:
            await made.stop()


async def trained(spec: JobSpec, trainers: int = 1) -> dict[str, torch.Tensor]:
    """Run a job to its end; the exported state_dict."""
    exported, _ = await trained_in(cluster, spec, trainers)
    return exported


async def trained_in(
    make: Any, spec: JobSpec, trainers: int = 1, *, death_at: int | None = None, limit_s: float = 50.0
) -> tuple[dict[str, torch.Tensor], Mapping[str, float]]:
    """Run a job to its end in a cluster that `make` makes: the exported state_dict, and the metrics.
    `death_at`: at this version a trainer is killed, and another one joins."""
    async with make(spec, trainers) as made:
        if death_at is not None:
            await made.version(death_at)
            await made.kill("trainer-0-x")
            made.add_trainer("trainer-9-x")
        state = await made.ended(limit_s)
        assert state.phase is Phase.COMPLETED, state
        return made.exported(), state.result.metrics

"""A whole collective job in one event loop, as tests/trainer_agent/cluster.py: the trainers exchange
gradients among themselves."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.equipment.cluster.direct_ports import DirectPserver
from tests.trainer_agent.cluster import TorchCluster
from trainer_agent.agent import Agent, AgentPorts
from trainer_agent.collective.native.exchange import NativePlace
from trainer_agent.collective.ports import CollectivePorts
from trainer_agent.collective.server import ShareServer
from trainer_agent.collective.state.messages import Portion, StateRequest
from trireme_shared.protocol.errors import NotReady, PeerError
from trireme_shared.protocol.records import Exchange, JobSpec, Phase, TrainerMember
from trireme_shared.protocol.wire.messages import PullEnd, PullRequest, PushHeader
from trireme_shared.serving.core.calls import OpenPull, OpenPush


class HeldShare(ShareServer):
    """Takes pushes of the steps up to the cluster's `last_step`, and gives versions up to its
    `last_given`."""

    def __init__(self, cluster: CollectiveCluster, name: str) -> None:
        super().__init__(cluster.spec.job, name)
        self._cluster = cluster

    def begin_push(self, header: PushHeader, on_settled: Callable[[], None] | None = None) -> OpenPush:
        if header.step > self._cluster.last_step:
            raise NotReady(f"the test holds the job at step {self._cluster.last_step}")
        return super().begin_push(header, on_settled)

    def begin_pull(self, request: PullRequest, arrived: Callable[[], None]) -> OpenPull | PullEnd:
        if request.version is not None and request.version > self._cluster.last_given:
            raise NotReady(f"the test gives nobody more than version {self._cluster.last_given}")
        return super().begin_pull(request, arrived)


class DirectShare(DirectPserver):
    """Of a trainer that lives."""

    def __init__(self, cluster: CollectiveCluster, name: str) -> None:
        self._cluster, self._name = cluster, name

    @property
    def _pserver(self) -> ShareServer:  # type: ignore[override]
        if self._name not in self._cluster.running:
            raise PeerError(f"{self._name} is dead")
        return self._cluster.shares[self._name]


class DirectDonor:
    """A trainer that lives gives its state; what is asked for later than its death is not answered."""

    def __init__(self, cluster: CollectiveCluster, name: str) -> None:
        self._cluster, self.name = cluster, name

    async def state(self, request: StateRequest) -> Portion:
        await asyncio.sleep(self._cluster.portion_s if request.blocks else 0.0)
        if self.name not in self._cluster.running:
            raise PeerError(f"{self.name} is dead")
        giver = self._cluster.shares[self.name].giver
        assert giver is not None
        portion = await giver.give(request)
        self._cluster.given[self.name] = self._cluster.given.get(self.name, 0) + len(portion.head.given)
        return portion

    async def close(self) -> None:
        pass


class CollectiveCluster(TorchCluster):
    """`shares`: what each trainer serves. `portion_s`: how long a portion of state is on its way; `given`:
    blocks, by donor. `last_step`: no step after it is made, so that the job does not end before what the test
    waits for. `last_given`: others get no version after it. `storages`: by trainer, what comes before its
    work on the storage."""

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        self.storages: dict[str, Callable[[], Awaitable[None]]] = {}
        self.shares: dict[str, ShareServer] = {}
        self.agents: dict[str, Agent] = {}
        self.portion_s = 0.0
        self.last_step = self.last_given = math.inf
        self.given: dict[str, int] = {}

    def add_trainer(self, name: str, script: Path | None = None) -> Agent:
        compute = self._computing.submit(self.built, script or Path(self.spec.script)).result()
        self.stopping[name] = asyncio.Event()
        self.shares[name] = HeldShare(self, name)
        exchange = Exchange(url=f"http://{name}:1")
        member = TrainerMember(
            trainer=name,
            url="http://127.0.0.1:1",
            incarnation=name,
            host="here",
            pid=1,
            exchange=exchange,
        )
        ports = AgentPorts(
            etcd=self.etcd_of(name),
            directory=self.directory,
            master=self.port,
            connect=lambda member: DirectShare(self, member.incarnation),
            offload=self.offload,
            collective=CollectivePorts(
                self.shares[name],
                exchange,
                connect_donor=lambda member: DirectDonor(self, member.trainer),
                background=partial(self._offload_of, name),
                native=NativePlace("127.0.0.1", "gloo"),
            ),
        )
        agent = self.agents[name] = Agent(self.spec, member, compute, ports, self.stopping[name])
        self.computes[name] = compute
        self.running[name] = self._group.create_task(self._outcome(agent))
        return agent

    async def _offload_of(self, name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        if (storage := self.storages.get(name)) is not None:
            await storage()
        return await self.offload(work, *arguments)

    async def version(self, version: int, limit_s: float = 50.0) -> None:
        """Wait until a living trainer has reached `version`."""
        async with asyncio.timeout(limit_s):
            while max((self._has(name) for name in self.running), default=-1) < version:
                await asyncio.sleep(0.001)

    def _has(self, name: str) -> int:
        store = self.shares[name].store
        return store.has if store is not None else -1


@asynccontextmanager
async def cluster(spec: JobSpec, trainers: int = 0) -> AsyncIterator[CollectiveCluster]:
    async with asyncio.TaskGroup() as group:
        made = CollectiveCluster(spec)
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

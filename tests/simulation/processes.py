"""What runs in each process: the product's compositions with the simulation's ports in place of HTTP, files
and torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from master_service.masterless.dispatcher import Dispatcher
from tests.equipment.cluster.network_ports import STALL_S, SimulatedMaster, SimulatedPserver
from tests.simulation.cluster import Main, SimulatedCluster
from tests.simulation.collective import ports_of
from tests.simulation.compute import Speed, TinyCompute
from tests.simulation.failing_storage import failing
from tests.simulation.nodes import Node
from tests.simulation.nonfinite import SkippingCompute
from trainer_agent.agent import Agent, AgentPorts
from trainer_agent.data_plane.fleet_client import call_limit_s
from trireme_shared.blocks.buffers import Buffer
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.runtime import ids
from trireme_shared.platform.runtime.containment import uninterrupted
from trireme_shared.platform.runtime.service import LEASE_LOST
from trireme_shared.protocol.records import Dispatch, TrainerMember
from trireme_shared.protocol.records.layout import ROWS
from trireme_shared.protocol.wire.messages import PushBlock, PushHeader, Verdict
from trireme_shared.serving.core.calls import OpenPush
from trireme_shared.serving.core.store import Store
from trireme_shared.serving.core.table.stepping import RowsServer, StepsAtOnce
from trireme_shared.serving.data_plane.row_turns import RowTurns
from trireme_shared.serving.ports import ServerPorts
from trireme_shared.serving.pserver import Pserver

DRAIN_S = 10.0
MAX_VIOLATIONS = 1000
PORTION_S = 0.002


async def at_once(work: Callable[..., Any], *arguments: Any) -> Any:
    """trainer_agent.model.compute.Offload without a thread."""
    await asyncio.sleep(0.002)
    return work(*arguments)


class CheckedPush(OpenPush):
    """Tells if a block takes a push of a generation older than one the pserver has seen."""

    def __init__(
        self, pserver: CheckedPserver, store: Store, header: PushHeader, on_settled: Callable[[], None] | None
    ) -> None:
        super().__init__(pserver, store, header, on_settled)
        self._checked, self._generation = pserver, header.generation

    def take_block(self, item: PushBlock, view: memoryview, memory: Buffer | None) -> Verdict | None:
        checked = self._checked
        checked.seen = max(checked.seen, checked.generation)
        verdict = super().take_block(item, view, memory)
        if verdict is Verdict.APPLIED:
            self._check_generation()
        owned = item.block == ROWS or checked.owns(item.block)
        if verdict is Verdict.APPLIED and not owned and len(checked.failures) < MAX_VIOLATIONS:
            checked.failures.append(
                f"{checked.incarnation} applied a push to block {item.block}, which it does not own"
            )
        return verdict

    def refusal_of_rows(self, item: PushBlock, rows: Any, ids: Any) -> Verdict | None:
        self._checked.seen = max(self._checked.seen, self._checked.generation)
        refusal = super().refusal_of_rows(item, rows, ids)
        if refusal is None:
            self._check_generation()
        return refusal

    def _check_generation(self) -> None:
        checked = self._checked
        if self._generation < checked.seen and len(checked.failures) < MAX_VIOLATIONS:
            checked.failures.append(
                f"{checked.incarnation} applied a push of generation {self._generation} after {checked.seen}"
            )


class SlowTurns(RowTurns):
    """Between two portions of an asynchronous push time passes, in which anything may happen. A thread that
    reads a snapshot would wait for ever in a step of all lanes, and while dropped slots give their memory
    back: these are done at once."""

    def __init__(self, server: RowsServer) -> None:
        super().__init__(server, turn_s=0.0)
        self._at_once = StepsAtOnce(server)

    def begin(self, store: Store) -> None:
        self._at_once.begin(store)

    def give_back(self, rows: Any) -> None:
        self._at_once.give_back(rows)

    def soon(self, call: Callable[..., None], *arguments: object) -> None:
        asyncio.get_running_loop().call_later(PORTION_S, call, *arguments)


class CheckedPserver(Pserver):
    """`seen`: the highest generation it has seen."""

    def __init__(self, cluster: SimulatedCluster, incarnation: str) -> None:
        super().__init__(cluster.keys.job, incarnation, ports=ServerPorts(row_steps=SlowTurns))
        self._cluster = cluster
        self.seen, self.failures = 0, cluster.failures

    def owns(self, block: int) -> bool:
        """By the slot map that etcd has at this moment. Not asked in a timeline that is over."""
        return self.timeline != self._cluster.state.timeline or self._cluster.owner_of(block) == self.index

    def open_push(self, store: Store, header: PushHeader, on_settled: Callable[[], None] | None) -> OpenPush:
        return CheckedPush(self, store, header, on_settled)


async def master(cluster: SimulatedCluster, node: Node) -> int:
    service = cluster.make_master(node.process.name, ids.new_id(node.name), node.url)
    node.service = service
    cluster.network.listen(node.url, node.process, service)
    await service.run(node.stopping)
    return 0


async def later(seconds: float, service: Pserver, work: Callable[..., Any], *arguments: Any) -> Any:
    """By a thread that other work keeps waiting. It has the lock of the tables when no push is half
    applied."""

    def locked() -> Any:
        service.row_steps.finish()
        return work(*arguments)

    if seconds:
        await asyncio.sleep(seconds)
    return await at_once(locked)


async def pserver(cluster: SimulatedCluster, node: Node) -> int:
    service = CheckedPserver(cluster, ids.new_id(node.name))
    node.service = service
    cluster.network.listen(node.url, node.process, service)
    offload = failing(cluster, node.name, partial(later, cluster.plan.storage_s, service))
    process = cluster.make_pserver(service, node.url, cluster.etcd_of(node.process.name), offload)
    return 0 if await process.member.serve(node.stopping, 300.0, DRAIN_S) else LEASE_LOST


async def trainer(cluster: SimulatedCluster, node: Node) -> int:
    """As trainer_agent/__main__.py and trireme/masterless.py, without the user's module, torch and HTTP."""
    etcd = cluster.etcd_of(node.process.name)
    name = ids.new_id(node.name)
    directory = Directory(etcd, cluster.keys)
    ports = ports_of(cluster, node, name)
    cluster.network.listen(node.url, node.process, ports.server if ports is not None else None)
    left = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        following = group.create_task(uninterrupted(directory.run()))
        if cluster.plan.dispatch is Dispatch.ETCD:
            node.dispatcher = cluster.make_master(node.process.name, name, node.url, Dispatcher)
            group.create_task(node.dispatcher.run(left))
        await directory.wait_for(lambda view: view.spec is not None, 600.0, "the job's spec")
        assert directory.spec is not None
        stall_s = call_limit_s(directory.spec, STALL_S)
        member = TrainerMember(
            trainer=name,
            url=node.url,
            incarnation=name,
            host="simulated",
            pid=1,
            exchange=ports.exchange if ports is not None else None,
        )
        job = cluster.plan.job
        compute = (SkippingCompute if job.skips else TinyCompute)(
            job.mode,
            cluster.trace,
            cluster.rng,
            _speed(cluster, node.name),
            job.travels_as,
            job.schedule,
            tables=job.tables,
            names_rows=cluster.plan.seed % 2 == 0,
        )
        agent_ports = AgentPorts(
            etcd=etcd,
            directory=directory,
            master=node.dispatcher or SimulatedMaster(cluster.network, directory),
            connect=lambda member: SimulatedPserver(cluster.network, member, cluster.check_versions, stall_s),
            offload=failing(cluster, node.name, at_once),
            collective=ports,
        )
        agent = Agent(directory.spec, member, compute, agent_ports, node.stopping)
        node.service = agent
        code = await agent.run()
        left.set()
        following.cancel()
    return code


def _speed(cluster: SimulatedCluster, name: str) -> Speed:
    """Some trainers are slower than others."""
    speed, factor = cluster.plan.speed, cluster.rng.choice(cluster.plan.slowness)
    if name == "trainer-0" and cluster.plan.slow > 1:
        factor = cluster.plan.slow
    return replace(speed, low_s=speed.low_s * factor, high_s=speed.high_s * factor)


MAINS: dict[str, Main] = {"master": master, "pserver": pserver, "trainer": trainer}

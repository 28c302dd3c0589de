"""Collective jobs in the simulation: their plans, what trainers serve to each other, and what is checked of
it.

At every moment: no trainer takes a push of an older generation than one it has seen, the versions that
trainers of a generation have are at most two apart, and trainers that have a version have the same bits of
it.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.equipment.cluster.network_ports import STALL_S
from tests.simulation.failing_storage import failing
from tests.simulation.plans import SLOWEST_STORAGE_S, FaultKind, Plan, plan_of
from trainer_agent.collective.mean_blocks import Arrived, MeanStore
from trainer_agent.collective.ports import CollectivePorts
from trainer_agent.collective.server import ShareServer
from trainer_agent.collective.state.messages import Portion, StateRequest
from trireme_shared.protocol.errors import AnotherProcess
from trireme_shared.protocol.records import Dispatch, Exchange, Mode, Phase, SlotMap, Strategy, TrainerMember
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.protocol.wire.messages import PushBlock, PushHeader, Verdict
from trireme_shared.serving.core.calls import OpenPush
from trireme_shared.serving.core.store import Store

if TYPE_CHECKING:
    from tests.simulation.cluster import SimulatedCluster
    from tests.simulation.nodes import Node
    from trainer_agent.collective.rows import RowMeans

MOST_APART = 2
NOT_HERE = {FaultKind.KILL_PSERVER, FaultKind.FREEZE_PSERVER}
MOST_FAILURES = 20
STORAGE_S = (0.0, 0.0, 0.2, 1.0, SLOWEST_STORAGE_S)  # what work on the storage takes longer at some trainers


def collective_plan(seed: int, dispatch: Dispatch = Dispatch.MASTER) -> Plan:
    """That of a job with parameter servers, without them."""
    drawn = plan_of(seed, Mode.SYNC, dispatch)
    job = replace(drawn.job, travels_as="float32", trainers_hold=True)
    faults = tuple(
        replace(fault, members=(0, fault.members[1])) for fault in drawn.faults if fault.kind not in NOT_HERE
    )
    return replace(
        drawn, job=job, strategy=Strategy.COLLECTIVE, pservers=0, storage_s=0.0, faults=faults, requests=()
    )


class CheckedSharePush(OpenPush):
    def take_block(self, item: PushBlock, view: memoryview, memory: Any) -> Verdict | None:
        checked: Any = self._server
        checked.seen = max(checked.seen, checked.generation)
        verdict = super().take_block(item, view, memory)
        if verdict is Verdict.APPLIED and self._header.generation < checked.seen:
            checked.fail(
                f"{checked.trainer} applied a push of generation {self._header.generation} after "
                f"{checked.seen}"
            )
        return verdict


class CheckedShare(ShareServer):
    """`seen`: the highest generation it has seen. `follows`: it had no share when the generation began, so it
    may be behind until it is open."""

    def __init__(self, cluster: SimulatedCluster, trainer: str) -> None:
        super().__init__(cluster.keys.job, trainer)
        self._cluster, self.seen, self.follows = cluster, 0, True

    def regroup(self, generation: int, place: int, slots: SlotMap | None, own: Collection[int]) -> None:
        self.follows |= self.store is None or not self.store.own
        super().regroup(generation, place, slots, own)

    def open(self, generation: int) -> None:
        self.follows = False
        super().open(generation)

    def open_push(self, store: Store, header: PushHeader, on_settled: Callable[[], None] | None) -> OpenPush:
        return CheckedSharePush(self, store, header, on_settled)

    def serve(self, store: MeanStore, timeline: int) -> None:
        complete = store.complete

        def completed(
            version: int, arrived: Arrived, record: StepRecord, rows: Mapping[int, RowMeans]
        ) -> None:
            complete(version, arrived, record, rows)
            check_complete(self._cluster, self)

        store.complete = completed  # type: ignore[method-assign]
        super().serve(store, timeline)

    def drop(self, generation: int) -> None:
        state, store = self._cluster.state, self.store
        trains = self.timeline == state.timeline and state.phase is Phase.RUNNING
        if store is not None and store.own and trains and not self._nobody_made(store):
            self.fail(
                f"{self.trainer} lost version {store.has}, although it is listed in generation "
                f"{self.generation}"
            )
        super().drop(generation)

    def _nobody_made(self, store: MeanStore) -> bool:
        """Whether those who have a newer version than this trainer all joined at it, and whoever made it is
        gone: so nobody has its mean gradients."""
        others = [
            share
            for share in shares(self._cluster)
            if share is not self and share.generation == self.generation
        ]
        newer = [share.store for share in others if share.store is not None and share.store.has > store.has]
        return bool(newer) and all(other.first_kept > other.has for other in newer)

    def fail(self, text: str) -> None:
        if len(self._cluster.failures) < MOST_FAILURES:
            self._cluster.failures.append(text)


def shares(cluster: SimulatedCluster) -> list[CheckedShare]:
    """Of the trainers that live and have something, in the job's timeline."""
    found = [
        node.share for node in cluster.nodes.values() if node.alive and isinstance(node.share, CheckedShare)
    ]
    return [share for share in found if share.store is not None and share.timeline == cluster.state.timeline]


def lowest_version(cluster: SimulatedCluster) -> int:
    return min((share.store.has for share in shares(cluster) if share.store is not None), default=0)


def digest_of(store: MeanStore, version: int) -> str:
    found = hashlib.sha256()
    for number, block in sorted(store.blocks.items()):
        buffer = block.kept[version]
        found.update(f"{number}:".encode() + (bytes(buffer.view) if buffer is not None else b"nothing"))
    if store.rows is not None:
        means = store.rows.whole[version]
        for part in (*means.ids, *means.gradients):
            found.update(part.tobytes())
        found.update(str(means.has_data).encode())
    return found.hexdigest()


def check_complete(cluster: SimulatedCluster, share: CheckedShare) -> None:
    """A trainer has a version now: all others that have it have the same."""
    store = share.store
    assert store is not None
    for other in shares(cluster):
        theirs = other.store
        if (
            theirs is None
            or other is share
            or other.generation != share.generation
            or other.opened != share.opened
        ):
            continue
        shared = store.own and theirs.own and not (share.follows or other.follows)
        if shared and abs(theirs.has - store.has) > MOST_APART:
            share.fail(f"{share.trainer} has version {store.has}, {other.trainer} {theirs.has}")
        if theirs.first_kept <= store.has <= theirs.has and digest_of(theirs, store.has) != digest_of(
            store, store.has
        ):
            share.fail(f"{share.trainer} and {other.trainer} have different bits of version {store.has}")


def storage_s_of(plan: Plan, trainer: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """How long the storage keeps the trainer waiting with this work."""
    del work, arguments
    return random.Random(f"storage-{plan.seed}-{trainer}").choice(STORAGE_S)


def ports_of(cluster: SimulatedCluster, node: Node, name: str) -> CollectivePorts | None:
    """What a trainer of the job serves; None in a job with parameter servers."""
    if cluster.plan.strategy is not Strategy.COLLECTIVE:
        return None
    node.share = CheckedShare(cluster, name)

    async def background(work: Callable[..., Any], *arguments: Any) -> Any:
        """A thread, that of a slow storage."""
        if seconds := storage_s_of(cluster.plan, name, work, arguments):
            await asyncio.sleep(seconds)
        return work(*arguments)

    return CollectivePorts(
        node.share,
        Exchange(url=node.url),
        connect_donor=lambda member: SimulatedDonor(cluster, member),
        background=failing(cluster, node.name, background),
    )


class SimulatedDonor:
    """trainer_agent.collective.state.catching_up.Donor, over the simulated network."""

    def __init__(self, cluster: SimulatedCluster, member: TrainerMember) -> None:
        assert member.exchange is not None
        self._cluster, self.name, self._url = cluster, member.trainer, member.exchange.url

    async def state(self, request: StateRequest) -> Portion:
        async def ask(share: ShareServer) -> Portion:
            if share.trainer != self.name or share.giver is None:
                raise AnotherProcess(f"{share.trainer} is not {self.name}")
            return await share.giver.give(request)

        portion: Portion = await self._cluster.network.call(self._url, ask, timeout_s=STALL_S)
        return portion

    async def close(self) -> None:
        pass

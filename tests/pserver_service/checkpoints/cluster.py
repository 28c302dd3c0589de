"""Parameter servers as processes on the virtual loop, with a simulated etcd and real files. The test is
master and trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pserver_service.recovery import load_store
from tests.equipment import logs
from tests.equipment.cluster.cluster import Cluster
from tests.equipment.cluster.crash_point import CrashPoint, StoppingProcess
from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.pserver_service.checkpoints import parts
from trireme_shared.checkpoints import stored
from trireme_shared.platform.etcd import Etcd, Put
from trireme_shared.platform.runtime import ids
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobSpec, JobState, Phase, PserverMember
from trireme_shared.protocol.records.checkpoints import CheckpointLatest
from trireme_shared.protocol.records.layout import Layout
from trireme_shared.protocol.records.step import CheckpointAsked
from trireme_shared.protocol.wire.messages import InitBlock, PushBlock, PushHeader
from trireme_shared.serving.core.store import Store
from trireme_shared.serving.pserver import Pserver

KEYS = Keys(parts.JOB)
TTL_S = 5.0
DRAIN_S = 8.0
CLUSTERS: list[PserverCluster] = []
"""Those of the scenario that runs."""


def run_scenario(scenario: Callable[..., Any], *arguments: Any, offline: bool = True) -> Any:
    """Run `scenario(*arguments)` on a loop of its own, with the same order of everything each time."""

    async def main() -> Any:
        try:
            return await scenario(*arguments)
        finally:
            while CLUSTERS:
                await CLUSTERS.pop().close()

    with logs.configured(logs.discard):
        return run_virtually(main, shuffled=False, offline=offline)


class Node:
    """One incarnation of a parameter server."""

    def __init__(self, cluster: PserverCluster, name: str) -> None:
        self.process = StoppingProcess(name)
        self.crash_point = CrashPoint(self.process)
        etcd = Etcd(self.crash_point.transport(cluster.simulated.transport(name)))
        made = cluster.make_pserver(
            Pserver(parts.JOB, ids.new_id(name)), name, etcd, self.crash_point.offload
        )
        self.pserver, self.directory = made.pserver, made.directory
        self.own_index, self.member = made.own_index, made.member
        self.stopping = asyncio.Event()
        self.task = self.process.spawn(self.member.serve(self.stopping, 600.0, DRAIN_S))


class PserverCluster(Cluster):
    def __init__(self, storage: str, pservers: int = 2, layout: Layout | None = None, **spec: Any) -> None:
        super().__init__(
            JobSpec(
                job=parts.JOB,
                script="s.py",
                dataset={"kind": "text_lines", "urls": ("-",)},
                lanes=parts.LANES,
                global_batch_size=4,
                pservers=pservers,
                storage=storage,
                lease_ttl_s=TTL_S,
                **{"checkpoint_every_steps": 2, "epochs": 99, **spec},
            ),
            # so a kill falls before, while and after etcd does something
            SimulatedEtcd(delay_s=(0.002, 0.002)),
        )
        self.storage = storage
        self.layout = layout or parts.layout_of()
        self.slots = parts.slot_map(pservers)
        self.state = JobState(phase=Phase.RUNNING, generation=1)
        self.trainers: tuple[str, ...] = (parts.TRAINER,)
        self.nodes: dict[int, Node] = {}
        self.every: list[Node] = []
        CLUSTERS.append(self)

    # ------------------------------------------------------------ members

    async def start(self, name: str) -> Node:
        """A new process; returns once it has its index."""
        node = Node(self, name)
        self.every.append(node)
        await until(lambda: node.pserver.index >= 0, f"{name} has an index", 4 * TTL_S)
        self.nodes[node.pserver.index] = node
        return node

    async def open(self) -> None:
        """Everybody is there, initialised, and the checkpoint of version 0 is committed."""
        await self.etcd.put(KEYS.spec, self.spec.to_bytes())
        await self.etcd.put(KEYS.pservers_desired, str(self.spec.pservers).encode())
        await self.write_state(self.state)
        for number in range(self.spec.pservers):
            await self.start(f"ps-{number}")
        await self.initialise()

    async def initialise(self) -> None:
        values = parts.initial(self.layout)
        for index, node in self.nodes.items():
            items = [
                (InitBlock(block=n), parts.bytes_view(values[n]))
                for n in parts.blocks_of(self.layout, index, self.slots)
            ]
            await node.pserver.init(parts.header_of(self.layout, index), stream(items))
        await self.etcd.put(KEYS.layout, self.layout.to_bytes())

    async def write_state(
        self, state: JobState, slots: Any = None, trainers: tuple[str, ...] | None = None
    ) -> None:
        self.state, self.slots = state, slots or self.slots
        self.trainers = self.trainers if trainers is None else trainers
        writes = [Put(KEYS.state, state.to_bytes()), Put(KEYS.slots, self.slots.to_bytes())]
        await self.etcd.txn([], [*writes, *parts.listed(KEYS, state.generation, self.trainers)])

    async def roll_back(
        self, pservers: int | None = None, checkpoint: str | None = None, damaged: tuple[str, ...] = ()
    ) -> list[PserverMember]:
        """What the master does when a pserver is lost; the members' answers. It may have to choose again."""
        members = await self._roll_back(pservers, checkpoint, damaged)
        while any(member.restored.superseded for member in members) and checkpoint is None:
            members = await self._roll_back(pservers, checkpoint, damaged)
        return members

    async def _roll_back(
        self, pservers: int | None, checkpoint: str | None, damaged: tuple[str, ...]
    ) -> list[PserverMember]:
        latest = await self.latest()
        generation = self.state.generation + 1
        state = self.state.model_copy(
            update={
                "phase": Phase.ROLLING_BACK,
                "generation": generation,
                "timeline": generation,
                "checkpoint": checkpoint or (latest.uuid if latest else ""),
                "damaged": damaged,
            }
        )
        slots = parts.slot_map(pservers, self.slots.version + 1) if pservers else self.slots
        await self.write_state(state, slots)
        goal = (state.timeline, state.checkpoint)
        while True:
            members = await self.members()
            said = [m.restored and (m.restored.timeline, m.restored.checkpoint) for m in members.values()]
            if len(said) == (pservers or self.spec.pservers) and all(each == goal for each in said):
                break
            await asyncio.sleep(0.1)
        if not any(member.restored.error for member in members.values()):
            await self.write_state(
                state.model_copy(update={"phase": Phase.RUNNING, "generation": generation + 1})
            )
        return list(members.values())

    async def members(self) -> dict[int, PserverMember]:
        found = [
            PserverMember.model_validate_json(kv.value)
            for kv in (await self.etcd.range(KEYS.pservers, prefix=True)).kvs
        ]
        return {member.index: member for member in found}

    # ------------------------------------------------------------ training

    async def train(self, first: int, last: int, asked: CheckpointAsked | None = None) -> None:
        """Steps [first, last) at all parameter servers that live; like a trainer it waits for nobody's
        checkpoint."""
        for step in range(first, last):
            for lane in range(parts.LANES):
                for node in self.nodes.values():
                    if not node.process.dead and not node.process.frozen:
                        await self.push(node, step, lane, asked)
            await asyncio.sleep(0.001)

    async def informed(self, node: Node) -> bool:
        """Wait until the node has read the job's generation, as a trainer does whose pushes are ahead of it.
        False: it died or froze."""
        generation, directory, process = self.state.generation, node.directory, node.process

        def is_informed() -> bool:
            return directory.state is not None and directory.state.generation >= generation

        def is_out() -> bool:
            return process.dead or process.frozen

        await until(lambda: is_out() or is_informed(), f"{node.pserver!r} reads generation {generation}")
        return not is_out()

    async def push(self, node: Node, step: int, lane: int, asked: CheckpointAsked | None = None) -> Any:
        """None if the node died or froze before it could take it."""
        if not await self.informed(node):
            return None
        header: PushHeader = parts.push_header(step, lane, generation=self.state.generation)
        if asked is not None and header.lane_zero is not None:
            header = header.model_copy(
                update={"lane_zero": header.lane_zero.model_copy(update={"asked": asked})}
            )
        return await node.pserver.push(header, stream(self.items(node, step, lane)))

    def items(self, node: Node, step: int, lane: int) -> list[tuple[PushBlock, Any]]:
        """What a trainer pushes to this parameter server of a lane."""
        gradients = parts.gradient(self.layout, step, lane)
        assert node.pserver.store is not None
        return [
            (PushBlock(block=n, lanes=(lane, lane + 1), count=3 + lane), parts.bytes_view(gradients[n]))
            for n in node.pserver.store.blocks
        ]

    @property
    def stores(self) -> list[Store]:
        return [node.pserver.store for _, node in sorted(self.nodes.items())]

    # ------------------------------------------------------------ checkpoints

    async def latest(self) -> CheckpointLatest | None:
        found = await self.etcd.get(KEYS.latest)
        return CheckpointLatest.model_validate_json(found.value) if found else None

    async def committed(self, step: int, limit_s: float = 60.0) -> CheckpointLatest:
        """Wait until the checkpoint of `step` in this timeline is the latest one and its committer is
        done."""
        loop = asyncio.get_running_loop()
        limit = loop.time() + limit_s
        while True:
            latest = await self.latest()
            found = latest is not None and (latest.timeline, latest.step) == (self.state.timeline, step)
            if found and await self.etcd.get(KEYS.finish_lock) is None:
                return latest
            assert loop.time() < limit, f"latest is {latest} after {limit_s} s, expected step {step}"
            await asyncio.sleep(0.05)

    async def tree(self) -> dict[str, bytes]:
        """All keys about checkpoints."""
        found = await self.etcd.range(KEYS.checkpoints, prefix=True)
        return {kv.key.removeprefix(KEYS.checkpoints): kv.value for kv in found.kvs}

    def check_latest(self, latest: CheckpointLatest) -> None:
        """Every kept checkpoint loads, and has the bits of an undisturbed job at that step."""
        for ref in latest.kept:
            manifest = stored.read_manifest(self.storage, parts.JOB, ref)
            stored.verify_parts(self.storage, ref, manifest)
            assert manifest.record.version == ref.step
            assert parts.state_of(parts.load(self.storage, ref, 1)) == expected(self.layout, ref.step), ref

    async def close(self) -> None:
        for node in self.every:
            node.process.at_last = lambda: None
            node.process.dead = node.process.frozen = False
            node.process.release()
            node.task.cancel()
        await asyncio.wait([node.task for node in self.every], timeout=30.0)


class Away:
    """An `offload` whose storage is not reached the first `times`."""

    def __init__(self, offload: Callable[..., Any], times: int) -> None:
        self._offload, self._times, self.refused = offload, times, 0

    async def __call__(self, work: Callable[..., Any], *arguments: Any) -> Any:
        if self.refused < self._times:
            self.refused += 1
            raise ConnectionError("no answer from http://s3")
        return await self._offload(work, *arguments)


class Slow:
    """An `offload` whose storage answers a read only once `answers` is set."""

    def __init__(self, offload: Callable[..., Any]) -> None:
        self._offload, self.asked, self.answers = offload, asyncio.Event(), asyncio.Event()

    async def __call__(self, work: Callable[..., Any], *arguments: Any) -> Any:
        if work is load_store:
            self.asked.set()
            await self.answers.wait()
        return await self._offload(work, *arguments)


def folders(storage: str | Path) -> set[str]:
    return {path.name for path in (Path(storage) / "checkpoints").iterdir()}


_EXPECTED: dict[tuple[bytes, int], dict[str, bytes]] = {}


def expected(layout: Layout, step: int) -> dict[str, bytes]:
    key = (layout.to_bytes(), step)
    if key not in _EXPECTED:
        stores = parts.fresh(layout, 1)
        parts.train(layout, stores, 0, step)
        _EXPECTED[key] = parts.state_of(stores)
    return _EXPECTED[key]


async def stream(items: list[Any]) -> Any:
    for item in items:
        yield item

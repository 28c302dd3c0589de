"""One member of a direct exchange, as a trainer has it, without a model: its server, its streams to the
others, its store of mean gradients.

gradient in the member's memory ─► pushed to the blocks' owners ─► mean gradients of all blocks pulled
    ─► the store has the next version
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from benchmarks.collective.contributions import contribution, differing
from benchmarks.measurements import MIB

JOB, HANG_S = "benchmark", 120.0


class DirectMember:
    """Member `place` of `members`. `kind`: tcp, unix or shm; `uds`: its UNIX socket, empty for tcp."""

    def __init__(self, kind: str, place: int, members: int, uds: str) -> None:
        import torch
        import uvloop

        from trainer_agent.collective.ports import SWITCH_S
        from trireme_shared.platform.runtime.service import serve_soon

        torch.set_num_threads(1)
        sys.setswitchinterval(SWITCH_S)
        self._kind, self._place, self._members, self._uds = kind, place, members, uds
        self._loop = uvloop.new_event_loop()
        self._loop.call_soon(serve_soon)
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def _await(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(HANG_S)

    def serve(self) -> int:
        """The port."""
        return self._await(self._serve())

    async def _serve(self) -> int:
        from trainer_agent.collective.server import ShareServer
        from trireme_shared.serving.data_plane.server import make_app, serving
        from trireme_shared.serving.ports import ServerPorts
        from trireme_shared.serving.transport.shared_memory import RegionAllocator

        self._server = ShareServer(JOB, _name(self._place), ServerPorts(RegionAllocator))
        listening = serving(make_app(self._server), "127.0.0.1", 0, self._uds)
        self._listening = listening  # until the process ends
        return (await listening.__aenter__()).port

    def begin(self, mib: int, block_kib: int, ports: Sequence[int], sockets: Sequence[str]) -> None:
        self._await(self._begin(mib << 18, block_kib << 10, ports, sockets))

    async def _begin(
        self, elements: int, block_bytes: int, ports: Sequence[int], sockets: Sequence[str]
    ) -> None:
        from trainer_agent.collective.exchange import CollectiveGroup
        from trainer_agent.collective.gathering import MeanGradients
        from trainer_agent.collective.groups import GroupView
        from trainer_agent.collective.ports import CollectivePorts
        from trainer_agent.collective.replica import Replica
        from trainer_agent.data_plane.stream import StreamPserver
        from trainer_agent.model.devices import HOST
        from trainer_agent.model.flat import Plan, Vector
        from trireme_shared.platform.membership.directory import Directory
        from trireme_shared.protocol.keys import Keys
        from trireme_shared.protocol.records import (
            Exchange,
            JobSpec,
            JobState,
            Mode,
            Phase,
            Strategy,
            TrainerList,
            TrainerMember,
        )
        from trireme_shared.protocol.records.datasets import Custom
        from trireme_shared.protocol.records.layout import Layout, OptimizerSpec, Segment

        members = self._members
        spec = JobSpec(
            job=JOB,
            script="none.py",
            dataset=Custom("none", reader="none:none"),
            mode=Mode.SYNC,
            strategy=Strategy.COLLECTIVE,
            pservers=0,
            trainers=members,
            lanes=members,
            global_batch_size=members,
            epochs=1,
            storage="/none",
        )
        optimizer = OptimizerSpec(name="SGD", defaults={}, groups=({"lr": 0.1},))
        segment = Segment(kind="param", dtype="float32", elements=elements, group=0)
        self._layout = Layout(segments=(segment,), block_bytes=block_bytes, digest="d", optimizer=optimizer)
        plan = Plan(self._layout, (), ())
        self._gradient = Vector(plan, HOST, shared=self._kind == "shm")
        self._gradient.segments[0].copy_(contribution(elements, self._place))
        self._out = self._gradient.memory()
        parameters = Vector(plan, HOST)  # never touched: nothing is stepped
        memory = parameters.memory()
        compute = SimpleNamespace(layout=self._layout, current=memory.__getitem__, staging=memory.__getitem__)

        here = socket.gethostname()
        addresses = [
            TrainerMember(
                trainer=_name(place),
                url=f"http://127.0.0.1:{port}",
                incarnation=_name(place),
                host=here,
                pid=0,
                exchange=Exchange(url=f"http://127.0.0.1:{port}", uds=uds),
            )
            for place, (port, uds) in enumerate(zip(ports, sockets, strict=True))
        ]
        etcd: Any = _Addresses(Keys(JOB), addresses)
        directory = Directory(etcd, Keys(JOB))
        directory.state = JobState(phase=Phase.RUNNING, generation=1)
        names = tuple(_name(place) for place in range(members))
        directory.trainers = TrainerList(generation=1, lanes=members, names=names)
        self._server.directory = directory
        open_ports: dict[str, StreamPserver] = {}

        def connect(member: Any) -> StreamPserver:
            if member.incarnation not in open_ports:
                open_ports[member.incarnation] = StreamPserver(member, share=self._kind == "shm")
            return open_ports[member.incarnation]

        async def certain() -> bool:
            return False

        view = GroupView(directory, etcd, _name(self._place), self._layout.slot_count)
        made: Any = compute
        standing = SimpleNamespace(certain=certain, set=lambda **_: None, without_doubt=lambda: None)
        self._means = MeanGradients(
            view,
            connect,
            made,
            lambda name, why: print(f"{_name(self._place)}: {name}: {why}", file=sys.stderr),
            standing,
            spec,
            CollectivePorts(self._server, addresses[self._place].exchange or Exchange(url="")),
        )
        from trireme_shared.protocol.records.step import LanePosition, StepRecord

        first = StepRecord(version=0, positions=tuple(LanePosition(lane=lane) for lane in range(members)))
        self._collective = CollectiveGroup(self._means, Replica(made), made, spec)
        self._means.begin(first, 0)
        self._running = asyncio.ensure_future(self._collective.run())

    def formed(self) -> None:
        """Wait until all members know each other."""
        self._await(self._formed())

    async def _formed(self) -> None:
        group = self._means.view.group
        assert group is not None
        async with asyncio.timeout(HANG_S):
            await group.formed.wait()

    def round(self, at: float) -> float:
        """Begins at `at`; when it has all mean gradients, both of time.monotonic."""
        time.sleep(max(0.0, at - time.monotonic()))
        return self._await(self._round())

    async def _round(self) -> float:
        from trainer_agent.data_plane.pushes import NodeSink, Outboxes, Verdict
        from trireme_shared.protocol.records import Mode
        from trireme_shared.protocol.records.step import LanePosition, LaneZero
        from trireme_shared.protocol.wire.messages import PushHeader

        exchange, means, lane = self._collective, self._means, self._place
        step = means.has
        header = PushHeader(
            **means.fleet.envelope(),
            mode=Mode.SYNC,
            trainer=_name(lane),
            step=step,
            positions=(LanePosition(lane=lane, minibatch=step + 1),),
            lane_zero=LaneZero(options=({"lr": 0.1},)) if lane == 0 else None,
        )
        boxes = Outboxes(means.fleet.routes, self._layout.payloads("float32"))
        out = SimpleNamespace(samples=lambda _: 1, contribution=lambda _, block: self._out[block])
        sink = NodeSink(boxes, (lane, lane + 1), out)
        gathering = asyncio.ensure_future(means.gather_to(step + 1))
        async with exchange.pushing(header, boxes) as verdicts:
            for block in range(boxes.blocks):
                sink.done(block)
            boxes.close()
        await gathering
        end = time.monotonic()
        assert set(verdicts.values()) == {Verdict.ACKNOWLEDGED}, verdicts
        assert means.store is not None
        means.store.in_use = step + 1  # as if it had been stepped
        means.store.forget()
        return end

    def check(self) -> int:
        """How many elements of the last mean gradient differ in a bit from the canonical tree."""
        return self._await(self._check())

    async def _check(self) -> int:
        import torch

        from trainer_agent.collective.mean_blocks import released

        store = self._means.store
        assert store is not None
        found = store.retained(store.has)
        parts = [found[number] for number in sorted(found)]
        whole = torch.cat([part.tensor for part in parts if part is not None])
        released(found)
        return differing(whole, self._members)

    def own_bytes(self) -> float:
        """MiB of the share."""
        store = self._means.store
        assert store is not None
        return sum(store.blocks[number].place.bytes for number in store.own) / MIB


class _Addresses:
    """In place of etcd: the members' keys, which is all that is read of it."""

    def __init__(self, keys: Any, members: Sequence[Any]) -> None:
        self._kvs = [
            SimpleNamespace(key=f"{keys.trainers}{each.trainer}", value=each.to_bytes()) for each in members
        ]

    async def range(self, *_: object, **__: object) -> Any:
        return SimpleNamespace(kvs=self._kvs)


def _name(place: int) -> str:
    return f"trainer-{place}-x"

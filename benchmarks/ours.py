"""Our side of dense.py: a real pserver in a process of its own, trainers' real clients in theirs."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

from benchmarks.rivals import LR, Remote, gradient_of, is_right, optimizer_options

JOB = "benchmark"


def new_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


class PserverProcess:
    """One pserver after the other, on TCP and a UNIX socket."""

    def __init__(self, uds: str) -> None:
        import torch

        from pserver_service.core.optimizers import warm_up

        torch.set_num_threads(1)
        warm_up()
        self._uds, self._stop, self._loop = uds, None, new_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def start(self) -> int:
        from pserver_service.app import make_app, serving
        from pserver_service.service import Pserver

        async def serve(ready: asyncio.Future, stop: asyncio.Event) -> None:
            async with serving(make_app(Pserver(JOB, "ps", 0)), "127.0.0.1", 0, self._uds) as listening:
                ready.set_result(listening.port)
                await stop.wait()

        async def begin() -> int:
            if self._stop is not None:
                self._stop.set()
                await self._task
            ready, self._stop = self._loop.create_future(), asyncio.Event()
            self._task = self._loop.create_task(serve(ready, self._stop))
            return await ready

        return asyncio.run_coroutine_threadsafe(begin(), self._loop).result(30)


class Trainer:
    """`share` of `of` trainers: pushes lane `share`, pulls everything."""

    def __init__(self, kind: str, share: int, of: int, uds: str) -> None:
        import torch

        torch.set_num_threads(1)
        self._kind, self._share, self._of, self._uds = kind, share, of, uds
        self._runner = asyncio.Runner(loop_factory=new_loop)

    def setup(self, mib: int, optimizer: str, port: int, block_kib: int) -> None:
        import torch

        from shared.records import PserverMember
        from shared.slots import Layout, OptimizerSpec, Segment
        from trainer_agent.flat import bytes_of
        from trainer_agent.pservers import HttpPserver
        from trainer_agent.stream import StreamPserver

        self._version, self._optimizer = 0, optimizer
        elements = mib << 18
        spec = OptimizerSpec(name=optimizer, defaults={}, groups=(optimizer_options(optimizer),))
        segment = Segment(kind="param", dtype="float32", elements=elements, group=0)
        self._layout = Layout(segments=(segment,), block_bytes=block_kib << 10, digest="d", optimizer=spec)
        self._blocks = list(self._layout.blocks())
        self._parameters, self._gradient = torch.zeros(elements), gradient_of(elements)
        self._into = [bytes_of(self._parameters[b.first : b.first + b.elements]) for b in self._blocks]
        self._out = [bytes_of(self._gradient[b.first : b.first + b.elements]) for b in self._blocks]
        member = PserverMember(
            index=0, url=f"http://127.0.0.1:{port}", incarnation="ps", host=socket.gethostname(), pid=0, uds=self._uds
        )
        self._port = (HttpPserver if self._kind == "plain" else StreamPserver)(member)
        if self._share == 0:
            self._runner.run(self._init())

    async def _init(self) -> None:
        from shared.messages import InitBlock, InitHeader, LanePosition, StepRecord

        async def blocks():
            for block, memory in zip(self._blocks, self._into, strict=True):
                yield InitBlock(block=block.number), memory

        record = StepRecord(version=0, positions=tuple(LanePosition(lane=lane) for lane in range(self._of)))
        header = InitHeader(
            job=JOB, generation=0, mode="sync", lanes=self._of, layout=self._layout, pserver=0, record=record
        )
        await self._port.init(header, blocks())

    def round(self) -> float:
        return self._runner.run(self._round())

    async def _round(self) -> float:
        from shared.messages import LanePosition, LaneZero, PullRequest, PushBlock, PushHeader

        lane = self._share

        async def blocks():
            for block, memory in zip(self._blocks, self._out, strict=True):
                yield PushBlock.model_construct(block=block.number, lanes=(lane, lane + 1), count=4), memory

        zero = LaneZero(options=({"lr": LR[self._optimizer]},)) if lane == 0 else None
        common = {"job": JOB, "generation": 1}
        numbers = tuple(block.number for block in self._blocks)
        start = time.perf_counter()
        header = PushHeader(
            **common, mode="sync", trainer="t", step=self._version, positions=(LanePosition(lane=lane),), lane_zero=zero
        )
        wanted = PullRequest(**common, version=self._version + 1, blocks=numbers, wait_s=30)
        answer, end = await asyncio.gather(
            self._port.push(header, blocks()), self._port.pull(wanted, lambda item: self._into[item.block])
        )
        took = time.perf_counter() - start
        assert answer.applied == len(numbers), answer
        assert end.code == "OK", end
        self._version += 1
        return took

    def check(self) -> bool:
        return is_right(self._parameters, self._optimizer, self._version)

    def close(self) -> None:
        if hasattr(self, "_port"):
            self._runner.run(self._port.close())


class Ours:
    """`kind`: plain, tcp or unix."""

    def __init__(self, kind: str, trainers: int, path: str, block_kib: int) -> None:
        uds = path if kind == "unix" else ""
        self._server = Remote(PserverProcess, uds)
        self._trainers = [Remote(Trainer, kind, share, trainers, uds) for share in range(trainers)]
        self._block_kib = block_kib

    def setup(self, mib: int, optimizer: str) -> None:
        for trainer in self._trainers:
            trainer.ask("close")
        port = self._server.ask("start")
        for trainer in self._trainers:
            trainer.ask("setup", mib, optimizer, port, self._block_kib)

    def round(self) -> float:
        for trainer in self._trainers:
            trainer.begin("round")
        return max(trainer.end() for trainer in self._trainers)

    def check(self) -> bool:
        return all(trainer.ask("check") for trainer in self._trainers)

    def close(self) -> None:
        for peer in (*self._trainers, self._server):
            peer.close()

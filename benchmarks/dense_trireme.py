"""Our side of dense.py: a real pserver in a process of its own, trainers' real clients in theirs."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Sequence

from benchmarks.baselines import LR, Remote, gradient_of, is_right, optimizer_options
from benchmarks.measurements import TRAINER_MIB, LoopLag, Memory
from trireme_shared.platform.runtime.service import serve_soon

STATE = {"SGD": 0, "Adam": 2}  # of an optimizer, in parameters
JOB = "benchmark"


def new_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


class PserverProcess:
    """One pserver `index` after the other, on TCP and a UNIX socket."""

    def __init__(self, index: int, uds: str) -> None:
        import torch

        from trireme_shared.platform.runtime.process_setup import optimizers_without_compiler

        torch.set_num_threads(1)
        optimizers_without_compiler()
        self._index, self._uds, self._stop, self._loop = index, uds, None, new_loop()
        self._lag = LoopLag()
        self._loop.call_soon(serve_soon)  # as trireme_shared.platform.runtime.service does
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._measuring = asyncio.run_coroutine_threadsafe(self._lag.run(), self._loop)

    def lags(self, windows: list[tuple[float, float]]) -> list[float]:
        return self._lag.take(windows)

    def memory(self) -> int:
        """The most that the pserver took, in bytes, without others' memory that it reads."""
        return self._memory.peak() - self._memory.borrowed()

    def resident(self) -> int:
        """As `memory`, at this moment, and the highest begins anew."""
        self._memory.forget_peak()
        return self._memory.now() - self._memory.borrowed()

    def start(self) -> int:
        from trireme_shared.serving.data_plane.row_turns import RowTurns
        from trireme_shared.serving.data_plane.server import make_app, serving
        from trireme_shared.serving.ports import ServerPorts, compile_in_thread
        from trireme_shared.serving.pserver import Pserver
        from trireme_shared.serving.transport.shared_memory import RegionAllocator

        async def serve(ready: asyncio.Future, stop: asyncio.Event) -> None:
            ports = ServerPorts(RegionAllocator, 60.0, RowTurns, compile_in_thread)  # as the service does
            self.pserver = Pserver(JOB, "ps", self._index, ports)
            app = make_app(self.pserver)
            async with serving(app, "127.0.0.1", 0, self._uds) as listening:
                ready.set_result(listening.port)
                await stop.wait()

        async def begin() -> int:
            if self._stop is not None:
                self._stop.set()
                await self._task
            ready, self._stop = self._loop.create_future(), asyncio.Event()
            self._task = self._loop.create_task(serve(ready, self._stop))
            return await ready

        port = asyncio.run_coroutine_threadsafe(begin(), self._loop).result(30)
        self._memory = Memory()
        return port


class Trainer:
    """`share` of `of` trainers: pushes lane `share`, pulls everything. `dtype`: of gradients and parameters
    on their way."""

    def __init__(self, kind: str, share: int, of: int, uds: str, dtype: str) -> None:
        import torch

        torch.set_num_threads(1)
        self._kind, self._share, self._of, self._uds, self._dtype = kind, share, of, uds, dtype
        self._runner = asyncio.Runner(loop_factory=new_loop)
        serve_soon()
        self._lag = LoopLag()

    def setup(self, mib: int, optimizer: str, ports: list[int], block_kib: int) -> None:
        from trainer_agent.model.devices import HOST
        from trainer_agent.model.flat import Plan, Vector
        from trainer_agent.model.gradient_tree import SendBuffers
        from trireme_shared.protocol.records.layout import Layout, OptimizerSpec, Segment

        self._parameters = self._gradient = self._into = self._out = self._send_buffers = (
            None  # those of the setup before
        )
        self._ports = []
        gc.collect()
        self._memory = Memory()
        self._version, self._optimizer = 0, optimizer
        elements = mib << 18
        spec = OptimizerSpec(name=optimizer, defaults={}, groups=(optimizer_options(optimizer),))
        segment = Segment(kind="param", dtype="float32", elements=elements, group=0)
        self._layout = Layout(segments=(segment,), block_bytes=block_kib << 10, digest="d", optimizer=spec)
        self._blocks = list(self._layout.blocks())
        plan = Plan(self._layout, (), ())
        parameters, gradient = Vector(plan, HOST), Vector(plan, HOST, shared=self._kind == "shm")
        self._parameters, self._gradient = parameters.segments[0], gradient.segments[0]
        self._gradient.copy_(gradient_of(elements))
        self._into, self._out = parameters.memory(), gradient.memory()
        self._narrow = self._layout.payloads(self._dtype)
        self._send_buffers = SendBuffers(plan, HOST, self._dtype, feedback=False, shared=self._kind == "shm")
        self._landing = memoryview(bytearray(block_kib << 10))
        self._ports = [self._connect(index, port) for index, port in enumerate(ports)]
        if self._share == 0:
            for index in range(len(ports)):
                self._runner.run(self._init(index))
        self._memory.forget_peak()

    def _connect(self, index: int, port: int):
        from trainer_agent.data_plane.stream import StreamPserver
        from trireme_shared.protocol.records import PserverMember

        url, uds = f"http://127.0.0.1:{port}", self._uds and f"{self._uds}-{index}"
        host = socket.gethostname()
        member = PserverMember(index=index, url=url, incarnation="ps", host=host, pid=0, uds=uds)
        return StreamPserver(member, share=self._kind == "shm")

    async def _init(self, index: int) -> None:
        from trireme_shared.protocol.records.step import LanePosition, StepRecord
        from trireme_shared.protocol.wire.messages import InitBlock, InitHeader

        async def blocks():
            for block in self._blocks[index :: len(self._ports)]:
                yield InitBlock(block=block.number), self._into[block.number]

        record = StepRecord(version=0, positions=tuple(LanePosition(lane=lane) for lane in range(self._of)))
        header = InitHeader(
            job=JOB,
            generation=0,
            mode="sync",
            lanes=self._of,
            layout=self._layout,
            pserver=index,
            record=record,
        )
        await self._ports[index].init(header, blocks())

    def round(self) -> float:
        return self._runner.run(self._measured(self._round()))

    async def _measured(self, work):
        measuring = asyncio.ensure_future(self._lag.run())
        try:
            return await work
        finally:
            measuring.cancel()

    def lags(self, windows: list[tuple[float, float]]) -> list[float]:
        return self._lag.take(windows)

    async def _round(self) -> float:
        start = time.perf_counter()
        await asyncio.gather(*(self._step(index) for index in range(len(self._ports))))
        self._version += 1
        return time.perf_counter() - start

    async def _step(self, index: int) -> None:
        from trireme_shared.protocol.records.step import LanePosition, LaneZero
        from trireme_shared.protocol.wire.messages import PullRequest, PushBlock, PushHeader

        lane, port, mine = self._share, self._ports[index], self._blocks[index :: len(self._ports)]

        async def blocks():
            for block in mine:
                memory = self._out[block.number]
                dtype = self._narrow[block.number]
                item = PushBlock.model_construct(
                    block=block.number, lanes=(lane, lane + 1), count=4, dtype=dtype
                )
                yield item, self._cast(block) if dtype else memory

        zero = LaneZero(options=({"lr": LR[self._optimizer]},)) if lane == 0 else None
        common = {"job": JOB, "generation": 1}
        numbers = tuple(block.number for block in mine)
        header = PushHeader(
            **common,
            mode="sync",
            trainer="t",
            step=self._version,
            positions=(LanePosition(lane=lane),),
            lane_zero=zero,
        )
        dtype = self._narrow[0]
        wanted = PullRequest(**common, version=self._version + 1, blocks=numbers, wait_s=30, dtype=dtype)
        # as training does: whatever becomes whole is on its way back while the rest is pushed
        pulling = port.pull(wanted, self._sink, self._widen if dtype else None)
        end, answer = await asyncio.gather(pulling, port.push(header, blocks()))
        assert answer.applied == len(numbers), answer
        assert end.code == "OK", end

    def calls(self, count: int) -> list[float]:
        return self._runner.run(self._calls(count))

    async def _calls(self, count: int) -> list[float]:
        """Pulls of no block."""
        from trireme_shared.protocol.wire.messages import PullRequest

        wanted, took = PullRequest(job=JOB, generation=1, version=self._version, blocks=()), []
        for _ in range(count):
            start = time.perf_counter()
            end = await self._ports[0].pull(wanted, self._sink)
            took.append(time.perf_counter() - start)
            assert end.code == "OK", end
        return took

    def _cast(self, block) -> memoryview:
        """As the product's trainers do it while backward goes on."""
        values = self._gradient[block.first : block.first + block.elements]
        self._send_buffers.put(0, block.number, values, bool)
        return self._send_buffers.memory(0)[block.number]

    def _sink(self, item) -> memoryview:
        whole = self._into[item.block]
        return self._landing[: whole.nbytes // 2] if item.dtype else whole

    def _widen(self, item) -> None:
        import torch

        block = self._blocks[item.block]
        narrow = torch.frombuffer(self._sink(item), dtype=getattr(torch, item.dtype))
        self._parameters[block.first : block.first + block.elements].copy_(narrow)

    def memory(self) -> int:
        """The most that the trainer took since `setup`, with what that left; as a pserver's."""
        return self._memory.peak() - self._memory.borrowed()

    def check(self) -> bool:
        return is_right(self._parameters, self._optimizer, self._version, self._dtype)

    def close(self) -> None:
        for port in getattr(self, "_ports", ()):
            self._runner.run(port.close())


class Trireme:
    """`kind`: tcp, unix or shm. Blocks go to the pservers in turn."""

    def __init__(
        self, kind: str, trainers: int, path: str, block_kib: int, dtype: str = "float32", pservers: int = 1
    ) -> None:
        uds = path if kind in {"unix", "shm"} else ""
        self._servers = [Remote(PserverProcess, index, uds and f"{uds}-{index}") for index in range(pservers)]
        self._trainers = [Remote(Trainer, kind, share, trainers, uds, dtype) for share in range(trainers)]
        self._block_kib = block_kib
        self._windows: list[tuple[float, float]] = []

    def setup(self, mib: int, optimizer: str) -> None:
        for trainer in self._trainers:
            trainer.ask("close")
        ports = [server.ask("start") for server in self._servers]
        for trainer in self._trainers:
            trainer.ask("setup", mib, optimizer, ports, self._block_kib)
        state, waiting = STATE[optimizer], min(len(self._trainers) - 1, len(self._trainers) / 2)
        self.bound = int((mib << 20) * (2 + state + waiting) / len(self._servers)) + (64 << 20)
        self.trainer_bound = (2 * mib + TRAINER_MIB) << 20
        self._windows = []

    def round(self) -> float:
        start = time.monotonic()
        for trainer in self._trainers:
            trainer.begin("round")
        took = max(trainer.end() for trainer in self._trainers)
        self._windows.append((start, time.monotonic()))
        return took

    def keep_rounds(self, numbers: Sequence[int]) -> None:
        """Lags of the other rounds so far do not count: the first ones touch new memory, others were
        disturbed."""
        self._windows = [self._windows[number] for number in numbers]

    def calls(self, count: int) -> list[float]:
        """Seconds that each of so many almost empty calls took."""
        return self._trainers[0].ask("calls", count)

    def lags(self) -> tuple[list[float], list[float]]:
        """Seconds by which the event loops of pservers and trainers were late in the rounds that count."""
        both = (
            [lag for peer in peers for lag in peer.ask("lags", self._windows)]
            for peers in (self._servers, self._trainers)
        )
        return tuple(both)

    def memory(self) -> tuple[int, int]:
        """The most that one pserver and one trainer took, in bytes, without others' memory that they read."""
        pserver, trainer = (
            max(peer.ask("memory") for peer in peers) for peers in (self._servers, self._trainers)
        )
        return pserver, trainer

    def cpu(self) -> list[float]:
        return [peer.cpu() for peer in (*self._servers, *self._trainers)]

    def check(self) -> bool:
        return all(trainer.ask("check") for trainer in self._trainers)

    def close(self) -> None:
        for peer in (*self._trainers, *self._servers):
            peer.close()

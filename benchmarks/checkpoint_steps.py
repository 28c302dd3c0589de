"""Steps of a trainer while a part of a checkpoint is written: the trainer's own pieces against a parameter
server's.

    trainer (this process): forward, backward, blocks pushed as they are finished, the next version pulled
    parameter server (a process): steps, copies the versions that are asked for, writes them behind the steps

The server's process tells through a pipe where it listens, then of each part that it has written. Every
second one it only writes as many bytes of nothing in a bare loop: what the machine makes of any write beside
such steps.
"""

from __future__ import annotations

import asyncio
import mmap
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import torch
import uvloop

from trainer_agent.data_plane.pushes import Outbox
from trainer_agent.data_plane.stream import StreamPserver
from trainer_agent.model.torch_compute import TorchCompute
from trainer_agent.script.user_module import load
from trireme_shared.checkpoints import writer
from trireme_shared.checkpoints.schedule import Schedule
from trireme_shared.checkpoints.writer import Background, lower_priority
from trireme_shared.platform.runtime import telemetry
from trireme_shared.platform.runtime.process_setup import optimizers_without_compiler
from trireme_shared.protocol.records import JobSpec, Mode, PserverMember
from trireme_shared.protocol.records.step import CheckpointAsked, LanePosition, StepRecord
from trireme_shared.protocol.wire.messages import InitBlock, InitHeader, PullRequest, PushBlock, PushHeader
from trireme_shared.serving.data_plane.row_turns import RowTurns
from trireme_shared.serving.data_plane.server import make_app, serving
from trireme_shared.serving.ports import ServerPorts
from trireme_shared.serving.pserver import Pserver
from trireme_shared.serving.transport.shared_memory import RegionAllocator

JOB = "benchmark"
SCRIPT = Path(__file__).parent / "scripts" / "residual.py"
WARM_UP, ALONE = 4, 3
PART_S = 120.0
PAST_CACHE = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True)
class Part:
    """Written from `begin` to `end` of the machine's monotonic clock; `bare`: only as many bytes of
    nothing."""

    begin: float
    end: float
    size: int
    bare: bool

    @property
    def mib_per_s(self) -> float:
        return self.size / (self.end - self.begin) / 2**20


@dataclass(frozen=True)
class Round:
    """Steps without a write, and then those beside one. `lost`: what the step that is copied and those beside
    the write took more than as many without; `beside`: of that, without the copied one, in `written` seconds
    of writing."""

    step_s: float
    lost_s: float
    beside_s: float
    written_s: float
    part: Part
    plain_mib_per_s: float


def slow_downs(rounds: Sequence[Round]) -> list[float]:
    """Of steps, if something were written all the time, from what each round lost in the usual time of a
    write."""
    written = statistics.median(one.written_s for one in rounds)
    return [written / max(written - one.beside_s, 1e-9) - 1 for one in rounds]


@dataclass(frozen=True)
class Measured:
    """`bare`: beside a bare loop of writes. `alone`: parts with nothing beside."""

    training: list[Round]
    bare_training: list[Round]
    exchanging: list[Round]
    bare_exchanging: list[Round]
    alone: list[Part]


class Steps:
    """One trainer, one parameter server that writes into `folder`."""

    def __init__(self, mib: int, optimizer: str, batch: int, folder: Path) -> None:
        os.environ |= {"RESIDUAL_MIB": str(mib), "RESIDUAL_OPTIMIZER": optimizer}
        user = load(SCRIPT)
        spec = JobSpec(
            job=JOB, script=str(SCRIPT), dataset=user.dataset(), storage=str(folder), lanes=1, device="cpu"
        )
        self._thread, self._folder = ThreadPoolExecutor(1), folder
        self._compute = TorchCompute(user, spec, self._thread, shared=True)
        self._blocks = tuple(block.number for block in self._compute.layout.blocks())
        self._records = [{"x": row.numpy()} for row in torch.rand(batch, 2048)]
        self._version, self._part_bytes = 0, 0
        context = multiprocessing.get_context("spawn")
        self._parts, theirs = context.Pipe()
        self._server = context.Process(target=serve, args=(str(folder), theirs), daemon=True)
        self._port: StreamPserver

    async def measure(self, rounds: int, quiet: int) -> Measured:
        """Rounds of `quiet` steps and a write, of training and of exchanging only, in turn."""
        self._server.start()
        port, uds = self._parts.recv()
        member = PserverMember(
            index=0,
            url=f"http://127.0.0.1:{port}",
            incarnation="ps",
            host=socket.gethostname(),
            pid=self._server.pid or 0,
            uds=uds,
        )
        async with StreamPserver(member, share=True) as self._port:
            await self._init()
            self._recv()  # version 0 is always due
            for computes in (True, False):
                for _ in range(WARM_UP):
                    await self._step(computes)
            for _ in range(2):  # the first of each kind with state: new memory
                await self._step(False, asks=True)
                self._part_bytes = self._recv().size
            await self._step(False, asks=True)  # so that a part is next
            self._recv()
            found = Measured([], [], [], [], [])
            for _ in range(rounds):
                plain = plain_speed(self._folder, self._part_bytes)
                found.training.append(await self._round(True, quiet, plain))
                found.bare_training.append(await self._round(True, quiet, plain))
                found.exchanging.append(await self._round(False, 2 * quiet, plain))
                found.bare_exchanging.append(await self._round(False, 2 * quiet, plain))
            while len(found.alone) < ALONE:
                await self._step(False, asks=True)
                if not (part := self._recv()).bare:
                    found.alone.append(part)
        self._server.kill()
        self._server.join()
        self._thread.shutdown()
        return found

    async def _round(self, computes: bool, quiet: int, plain: float) -> Round:
        await self._step(computes)  # the first after something else
        before = [await self._step(computes) for _ in range(quiet)]
        usual = statistics.median(end - begin for begin, end in before)
        copied = await self._step(computes, asks=True)
        beside = []
        while not self._parts.poll():
            beside.append(await self._step(computes))
        part = self._recv()
        more = [end - begin - usual for begin, end in beside]
        return Round(
            step_s=usual,
            lost_s=copied[1] - copied[0] - usual + sum(more),
            beside_s=sum(more),
            written_s=sum(overlap(step, part) for step in beside),
            part=part,
            plain_mib_per_s=plain,
        )

    def _recv(self) -> Part:
        assert self._parts.poll(PART_S), f"no part within {PART_S} s"
        return self._parts.recv()

    async def _init(self) -> None:
        record = StepRecord(
            version=0, positions=(LanePosition(lane=0),), lane_zero=self._compute.initial_lane_zero()
        )
        header = InitHeader(
            job=JOB,
            generation=0,
            mode=Mode.SYNC,
            lanes=1,
            layout=self._compute.layout,
            pserver=0,
            record=record,
        )
        await self._port.init(header, self._initial())

    async def _initial(self) -> AsyncIterator[tuple[InitBlock, memoryview]]:
        for number in self._blocks:
            yield InitBlock(block=number), self._compute.current(number)

    async def _step(self, computes: bool, *, asks: bool = False) -> tuple[float, float]:
        """When it began and ended. `asks`: the version it makes becomes a checkpoint."""
        begin, step, outbox = time.monotonic(), self._version, Outbox()
        asked = CheckpointAsked(operation="o", attempt=step, generation=1, version=step + 1) if asks else None
        header = PushHeader(
            job=JOB,
            generation=1,
            mode=Mode.SYNC,
            trainer="t",
            step=step,
            positions=(LanePosition(lane=0, index=step + 1),),
            lane_zero=self._compute.begin_step().model_copy(update={"asked": asked}),
        )
        wanted = PullRequest(job=JOB, generation=1, version=step + 1, blocks=self._blocks, wait_s=30)

        def done(block: int) -> None:
            item = PushBlock.model_construct(block=block, lanes=(0, 1), count=len(self._records))
            outbox.add(item, self._compute.contribution((0, 1), block))

        async with asyncio.TaskGroup() as group:
            pushing = group.create_task(self._port.push(header, outbox.stream()))
            pulling = group.create_task(
                self._port.pull(wanted, lambda item: self._compute.staging(item.block))
            )
            if computes:
                self._compute.forget_nodes()
                await self._compute.gradient((0, 1), 0, step, self._records, SimpleNamespace(done=done))
            else:
                for block in self._blocks:
                    done(block)
            outbox.close()
            answer, end = await pushing, await pulling
        assert answer.applied == len(self._blocks), answer
        assert end.code == "OK", end
        self._compute.swap()
        self._version += 1
        return begin, time.monotonic()


def serve(folder: str, parts: Connection) -> None:
    telemetry.configure(level="ERROR", json=False)
    torch.set_num_threads(1)
    optimizers_without_compiler()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(folder, parts))


async def _serve(folder: str, parts: Connection) -> None:
    pserver = Pserver(JOB, "ps", index=0, ports=ServerPorts(RegionAllocator, row_steps=RowTurns))
    pserver.schedule = Schedule(every_steps=None, every_epochs=None, epochs=1 << 30)
    offload, loop = Background(), asyncio.get_running_loop()
    behind = ThreadPoolExecutor(1, "bare", initializer=lower_priority)
    bare = True
    async with serving(make_app(pserver), "127.0.0.1", 0, f"{folder}/socket") as listening:
        parts.send((listening.port, listening.uds))
        while True:
            await pserver.snapshot_ready.wait()
            pserver.snapshot_ready.clear()
            snapshot = pserver.store.take_snapshot() if pserver.store is not None else None
            if snapshot is None:
                continue
            bare = not bare
            url, size = (
                f"{folder}/part-{snapshot.version}",
                sum(one.buffer.view.nbytes for one in snapshot.tensors.values()),
            )
            begin = time.monotonic()
            if bare:
                await loop.run_in_executor(behind, plain_write, Path(url), size, PAST_CACHE)
            else:
                size = (await offload(writer.write_part, url, dict, snapshot)).bytes
            end = time.monotonic()
            snapshot.release()
            await offload(Path(url).unlink)
            parts.send(Part(begin, end, size, bare))


def overlap(step: tuple[float, float], part: Part) -> float:
    return max(0.0, min(step[1], part.end) - max(step[0], part.begin))


def plain_speed(folder: Path, size: int) -> float:
    """MiB/s of a write and fsync of `size` bytes: the faster of one through the page cache and one past
    it."""
    speeds = []
    for flag in {0, PAST_CACHE}:
        begin = time.perf_counter()
        plain_write(folder / "plain", size, flag)
        speeds.append(size / (time.perf_counter() - begin) / 2**20)
        (folder / "plain").unlink()
    return max(speeds)


def plain_write(path: Path, size: int, flag: int) -> None:
    """At least `size` bytes of nothing, and fsync. `flag`: O_DIRECT, where the file system knows it, or 0."""
    content = memoryview(mmap.mmap(-1, 4 << 20))
    content[:] = b"\1" * len(content)
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | flag)
    except OSError:
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
    for _ in range(0, size, len(content)):
        os.write(file, content)
    os.fsync(file)
    os.close(file)

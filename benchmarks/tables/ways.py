"""Ways to look rows up and step them: our parameter server, over each transport, and torch's sparse embedding
in this process.

Of each minibatch, by its number: `lookup` gives seconds, `steps` those of some until the last is applied,
`small` those of one lookup of few keys, `found` the rows, float32 (ids, dim). Making minibatches is not
timed.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from benchmarks.dense_trireme import JOB, new_loop
from benchmarks.tables.minibatches import LR, SCALE, SEED, Minibatches


class Way(Protocol):
    name: str

    def lookup(self, number: int) -> float: ...
    def steps(self, numbers: Sequence[int]) -> float: ...
    def small(self, number: int) -> float: ...
    def found(self, number: int) -> np.ndarray: ...
    def close(self) -> None: ...


def table_spec(dim: int):
    from trireme_shared.protocol.records.layout import RowInit, RowOptimizer, TableSpec

    optimizer = RowOptimizer(kind="adam", lr=LR, eps=1e-8)
    return TableSpec(
        name="t", dim=dim, seed=SEED, optimizer=optimizer, init=RowInit(kind="uniform", scale=SCALE)
    )


class Torch:
    """nn.Embedding(sparse=True) and SparseAdam in this process: ids are numbers of rows, without any hashing
    or network."""

    name = "torch"

    def __init__(self, data: Minibatches) -> None:
        import torch

        from trireme_shared.tables.table import initial_values

        torch.set_num_threads(1)
        self._torch, self._data = torch, data
        first = torch.from_numpy(initial_values(table_spec(data.dim), data.all))
        self._embedding = torch.nn.Embedding.from_pretrained(first, freeze=False, sparse=True)
        self._optimizer = torch.optim.SparseAdam(self._embedding.parameters(), lr=LR)
        for _ in data.pieces():  # as many steps as ours take to make the rows: Adam counts them
            nothing = torch.zeros(data.ids, data.dim)
            self._step(torch.from_numpy(data.places(-1)), nothing)

    def lookup(self, number: int) -> float:
        places = self._torch.from_numpy(self._data.places(number))
        begin = time.perf_counter()
        self._rows(places)
        return time.perf_counter() - begin

    def _rows(self, places) -> np.ndarray:
        with self._torch.no_grad():
            return self._embedding(places).numpy()

    def found(self, number: int) -> np.ndarray:
        return self._rows(self._torch.from_numpy(self._data.places(number)))

    def small(self, number: int) -> float:
        places = self._torch.from_numpy(np.searchsorted(self._data.all, self._data.few(number)))
        begin = time.perf_counter()
        self._rows(places)
        return time.perf_counter() - begin

    def steps(self, numbers: Sequence[int]) -> float:
        given = [(self._data.places(number), self._data.gradients(number)) for number in numbers]
        begin = time.perf_counter()
        for places, gradients in given:
            self._step(self._torch.from_numpy(places), self._torch.from_numpy(gradients))
        return time.perf_counter() - begin

    def _step(self, places, gradients) -> None:
        self._optimizer.zero_grad()
        self._embedding(places).backward(gradients)
        self._optimizer.step()

    def close(self) -> None:
        pass


class Server:
    """Our trainer's end: look up what differs, spread it, push the sums, wait for the version. `kind`: shm,
    unix or tcp."""

    def __init__(self, kind: str, data: Minibatches, port: int, uds: str) -> None:
        from trainer_agent.data_plane.stream import StreamPserver
        from trireme_shared.protocol.records import PserverMember
        from trireme_shared.protocol.records.layout import Layout, OptimizerSpec, Segment
        from trireme_shared.serving.transport.shared_memory import GradientMemory

        self.name = kind
        self._data, self._version = data, 0
        spec = OptimizerSpec(name="SGD", defaults={}, groups=({"lr": 0.1},))
        segment = Segment(kind="param", dtype="float32", elements=64, group=0)
        self.layout = Layout(
            segments=(segment,), block_bytes=256, digest="d", optimizer=spec, tables=(table_spec(data.dim),)
        )
        self._memory = GradientMemory()
        # no asyncio.Runner: each `run` sets a handler of signals, and takes 0.7 ms for it
        self._loop = new_loop()
        host, url = socket.gethostname(), f"http://127.0.0.1:{port}"
        local = f"{uds}-0" if kind in ("shm", "unix") else ""
        member = PserverMember(index=0, url=url, incarnation="ps", host=host, pid=0, uds=local)
        self._port = StreamPserver(member, share=kind == "shm")

    def begin(self) -> None:
        """All rows exist then, with a gradient of zero."""
        self._loop.run_until_complete(self._begin())

    async def _begin(self) -> None:
        from trireme_shared.protocol.records.step import LanePosition, StepRecord
        from trireme_shared.protocol.wire.messages import InitBlock, InitHeader

        async def blocks():
            yield InitBlock(block=0), memoryview(np.zeros(64, np.float32)).cast("B")

        record = StepRecord(version=0, positions=(LanePosition(lane=0),))
        header = InitHeader(
            job=JOB, generation=0, mode="sync", lanes=1, layout=self.layout, pserver=0, record=record
        )
        await self._port.init(header, blocks())
        for some in self._data.pieces():
            await self._push(some, np.zeros((len(some), self._data.dim), np.float32))

    async def _rows(self, ids: np.ndarray) -> np.ndarray:
        from trireme_shared.protocol.wire.messages import LookupRequest
        from trireme_shared.tables.payload import joined, rows_in

        request = LookupRequest(job=JOB, generation=0, version=self._version, rows=(len(ids),), wait_s=10.0)
        end, rows = await self._port.lookup(request, joined([ids]))
        assert end.code == "OK", end
        return rows_in(rows, (len(ids),), [self._data.dim], ids=False)[0]

    async def _push(self, ids: np.ndarray, gradients: np.ndarray, *, asks: bool = False) -> None:
        from trireme_shared.protocol.records.layout import ROWS
        from trireme_shared.protocol.records.step import CheckpointAsked, LanePosition, LaneZero
        from trireme_shared.protocol.wire.messages import PullRequest, PushBlock, PushHeader
        from trireme_shared.tables.payload import joined

        step = self._version
        asked = CheckpointAsked(operation="o", attempt=step, generation=0, version=step + 1) if asks else None
        header = PushHeader(
            job=JOB,
            generation=0,
            mode="sync",
            trainer="t",
            step=step,
            positions=(LanePosition(lane=0, offset=step + 1),),
            lane_zero=LaneZero(options=({"lr": 0.1},), asked=asked),
        )

        async def blocks():
            yield PushBlock(block=0, lanes=(0, 1), count=1), memoryview(np.zeros(64, np.float32)).cast("B")
            payload = joined([ids], [gradients], None, self._memory.take)
            yield PushBlock(block=ROWS, lanes=(0, 1), count=1, rows=(len(ids),)), payload

        answer = await self._port.push(header, blocks())
        assert not answer.refused, answer
        self._version += 1
        request = PullRequest(job=JOB, generation=0, version=self._version, blocks=(0,), wait_s=30.0)
        end = await self._port.pull(request, lambda _: memoryview(bytearray(256)))
        assert end.code == "OK", end

    def lookup(self, number: int) -> float:
        ids = self._data.of(number)
        begin = time.perf_counter()
        self._spread(ids)
        return time.perf_counter() - begin

    def _spread(self, ids: np.ndarray) -> np.ndarray:
        from trireme_shared.tables.grouping import grouped

        found = grouped(ids)
        rows = self._loop.run_until_complete(self._rows(found.ids))
        return np.take(rows, found.numbers(), axis=0)

    def found(self, number: int) -> np.ndarray:
        return self._spread(self._data.of(number))

    def small(self, number: int) -> float:
        ids = np.sort(self._data.few(number))
        begin = time.perf_counter()
        self._loop.run_until_complete(self._rows(ids))
        return time.perf_counter() - begin

    def empty(self) -> float:
        """Seconds of a lookup without ids."""
        begin = time.perf_counter()
        self._loop.run_until_complete(self._rows(np.empty(0, np.int64)))
        return time.perf_counter() - begin

    def steps(self, numbers: Sequence[int]) -> float:
        given = [(self._data.of(number), self._data.gradients(number)) for number in numbers]
        begin = time.perf_counter()
        for ids, gradients in given:
            self.step(ids, gradients)
        return time.perf_counter() - begin

    def step(self, ids: np.ndarray, gradients: np.ndarray, *, asks: bool = False) -> None:
        """`asks`: the version it makes becomes a checkpoint."""
        from trireme_shared.tables.grouping import grouped
        from trireme_shared.tables.lanes import sums_of

        found = grouped(ids)
        self._loop.run_until_complete(self._rows(found.ids))
        self._loop.run_until_complete(self._push(found.ids, sums_of(found, gradients), asks=asks))

    def close(self) -> None:
        self._loop.run_until_complete(self._port.close())
        self._loop.close()

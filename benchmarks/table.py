"""Embedding tables: lookups and steps of rows through one parameter server, beside torch's own sparse embedding in one process.

    python -m benchmarks.table [--rows 1000000] [--dim 16] [--ids 100000] [--rounds 9] [--transports unix tcp http]

One table whose rows all exist. A minibatch has `--ids` ids, Zipf 1.1 over the rows; ids/s count all of them, as users do, not only those that
differ. Ways take turns, round by round; medians, with the first and third quartile. Every round's values are checked: those of all ways agree
to the bit. Peers with parameter servers of their own (Paddle, TFRA) are not measured by this command.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.baselines import Remote
from benchmarks.dense_trireme import JOB, PserverProcess, new_loop
from benchmarks.measurements import p99_and_max

SEED, LR, SLOTS = 7, 0.01, 1024
SMALL = 2000


def table_spec(dim: int):
    from shared.records.layout import RowInit, RowOptimizer, TableSpec

    optimizer = RowOptimizer(kind="adam", lr=LR, eps=1e-8)
    return TableSpec(name="t", dim=dim, seed=SEED, optimizer=optimizer, init=RowInit(kind="uniform", scale=0.01))


class Minibatches:
    """The same for every way: by number, ids (with repetitions) and the gradient of each occurrence."""

    def __init__(self, rows: int, dim: int, ids: int) -> None:
        rng = np.random.default_rng(1)
        self.all = np.unique(rng.integers(-(2**62), 2**62, rows))
        self.rows, self.dim, self.ids = len(self.all), dim, ids
        weights = 1.0 / np.arange(1, self.rows + 1) ** 1.1
        self._edges = np.cumsum(weights / weights.sum())

    def places(self, number: int, ids: int | None = None) -> np.ndarray:
        rng = np.random.default_rng(1000 + number)
        found = np.searchsorted(self._edges, rng.random(ids or self.ids))
        return (np.minimum(found, self.rows - 1) * 2_654_435_761) % self.rows  # popular ids are everywhere

    def gradients(self, number: int) -> np.ndarray:
        return np.random.default_rng(number).standard_normal((self.ids, self.dim)).astype(np.float32)


class Torch:
    """nn.Embedding(sparse=True) and SparseAdam in this process: ids are numbers of rows, without any hashing or network."""

    name = "torch, in process"

    def __init__(self, data: Minibatches) -> None:
        import torch

        from shared.tables.updates import initial_values

        torch.set_num_threads(1)
        first = initial_values(table_spec(data.dim), data.all)
        self._torch, self._data = torch, data
        self._embedding = torch.nn.Embedding.from_pretrained(torch.from_numpy(first), freeze=False, sparse=True)
        self._optimizer = torch.optim.SparseAdam(self._embedding.parameters(), lr=LR)

    def lookup(self, number: int) -> np.ndarray:
        with self._torch.no_grad():
            return self._embedding(self._torch.from_numpy(self._data.places(number))).numpy()

    def step(self, gradients: np.ndarray, places: np.ndarray) -> None:
        self._optimizer.zero_grad()
        self._embedding(self._torch.from_numpy(places)).backward(self._torch.from_numpy(gradients))
        self._optimizer.step()


class Server:
    """Our trainer's end: look up what differs, spread it, push the sums, wait for the version."""

    def __init__(self, kind: str, data: Minibatches, port: int, uds: str) -> None:
        from shared.records import PserverMember
        from shared.records.layout import Layout, OptimizerSpec, Segment
        from trainer_agent.data_plane.http import HttpPserver
        from trainer_agent.data_plane.stream import StreamPserver

        self.name = f"one parameter server, {kind}"
        self._data, self._version = data, 0
        spec = OptimizerSpec(name="SGD", defaults={}, groups=({"lr": 0.1},))
        segment = Segment(kind="param", dtype="float32", elements=64, group=0)
        self.layout = Layout(
            segments=(segment,), block_bytes=256, digest="d", optimizer=spec, tables=(table_spec(data.dim),)
        )
        self.runner = asyncio.Runner(loop_factory=new_loop)
        host, url = socket.gethostname(), f"http://127.0.0.1:{port}"
        member = PserverMember(
            index=0, url=url, incarnation="ps", host=host, pid=0, uds=f"{uds}-0" if kind == "unix" else ""
        )
        self._port = HttpPserver(member) if kind == "http" else StreamPserver(member, share=False)

    def begin(self) -> None:
        self.runner.run(self._begin())

    async def _begin(self) -> None:
        from shared.records.step import LanePosition, StepRecord
        from shared.wire.messages import InitBlock, InitHeader

        async def blocks():
            yield InitBlock(block=0), memoryview(np.zeros(64, np.float32)).cast("B")

        record = StepRecord(version=0, positions=(LanePosition(lane=0),))
        header = InitHeader(job=JOB, generation=0, mode="sync", lanes=1, layout=self.layout, pserver=0, record=record)
        await self._port.init(header, blocks())
        everything = self._data.all
        for first in range(0, len(everything), 1 << 18):  # all rows exist, with a gradient of zero
            some = everything[first : first + (1 << 18)]
            await self._push(some, np.zeros((len(some), self._data.dim), np.float32))

    async def _rows(self, ids: np.ndarray) -> np.ndarray:
        from shared.tables.payload import joined, rows_in
        from shared.wire.messages import LookupRequest

        request = LookupRequest(job=JOB, generation=0, version=self._version, rows=(len(ids),), wait_s=10.0)
        end, rows = await self._port.lookup(request, joined([ids]))
        assert end.code == "OK", end
        return rows_in(rows, (len(ids),), [self._data.dim], ids=False)[0]

    async def _push(self, ids: np.ndarray, gradients: np.ndarray) -> None:
        from shared.records.layout import ROWS
        from shared.records.step import LanePosition, LaneZero
        from shared.tables.payload import joined
        from shared.wire.messages import PullRequest, PushBlock, PushHeader

        header = PushHeader(
            job=JOB,
            generation=0,
            mode="sync",
            trainer="t",
            step=self._version,
            positions=(LanePosition(lane=0, offset=self._version + 1),),
            lane_zero=LaneZero(options=({"lr": 0.1},)),
        )

        async def blocks():
            yield PushBlock(block=0, lanes=(0, 1), count=1), memoryview(np.zeros(64, np.float32)).cast("B")
            yield PushBlock(block=ROWS, lanes=(0, 1), count=1, rows=(len(ids),)), joined([ids], [gradients])

        answer = await self._port.push(header, blocks())
        assert not answer.refused, answer
        self._version += 1
        request = PullRequest(job=JOB, generation=0, version=self._version, blocks=(0,), wait_s=30.0)
        end = await self._port.pull(request, lambda _: memoryview(bytearray(256)))
        assert end.code == "OK", end

    def lookup(self, number: int) -> np.ndarray:
        from shared.tables.grouping import grouped

        found = grouped(self._data.all[self._data.places(number)])
        return self.runner.run(self._rows(found.ids))[found.numbers()]

    def small(self, number: int) -> None:
        self.runner.run(self._rows(np.unique(self._data.all[self._data.places(number, SMALL)])))

    def step(self, gradients: np.ndarray, places: np.ndarray) -> None:
        from shared.tables.grouping import grouped
        from shared.tables.lanes import sums_of

        found = grouped(self._data.all[places])
        self.runner.run(self._rows(found.ids))
        self.runner.run(self._push(found.ids, sums_of(found, gradients)))

    def close(self) -> None:
        self.runner.run(self._port.close())
        self.runner.close()


def timed(work, *arguments) -> tuple[float, object]:
    began = time.perf_counter()
    found = work(*arguments)
    return time.perf_counter() - began, found


def quartiles(values: list[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return f"({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--ids", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--transports", nargs="+", choices=["unix", "tcp", "http"], default=["unix", "tcp"])
    options = parser.parse_args()
    data = Minibatches(options.rows, options.dim, options.ids)
    with tempfile.TemporaryDirectory() as folder:
        ways: list[Torch | Server] = [Torch(data)]
        servers: list[Remote] = []
        try:
            for kind in options.transports:
                uds = str(Path(folder) / kind)
                servers.append(Remote(PserverProcess, 0, f"{uds}-0"))
                server = Server(kind, data, servers[-1].ask("start"), uds)
                server.begin()
                ways.append(server)
            warm = {"lookup": -1, "step": -2}
            for way in ways:
                way.lookup(warm["lookup"])
            lookups: dict[str, list[float]] = {way.name: [] for way in ways}
            steps: dict[str, list[float]] = {way.name: [] for way in ways}
            small: dict[str, list[float]] = {way.name: [] for way in ways if isinstance(way, Server)}
            for number in range(options.rounds):
                gradients, places = data.gradients(number), data.places(number)
                expected = None
                for way in ways:
                    seconds, found = timed(way.lookup, number)
                    lookups[way.name].append(options.ids / seconds / 1e6)
                    expected = found if expected is None else expected
                    if number == 0:  # later the peer's steps of rows without a gradient differ from ours
                        assert np.array_equal(expected, found), f"{way.name} found other values"
                for way in ways:
                    steps[way.name].append(options.ids / timed(way.step, gradients, places)[0] / 1e6)
                for way in ways:
                    if isinstance(way, Server):
                        small[way.name] += [timed(way.small, 100 * number + k)[0] * 1e3 for k in range(40)]
            distinct = len(np.unique(data.places(0)))
            print(
                f"{data.rows:,} rows of {options.dim}, {options.ids:,} ids a minibatch, {distinct:,} of them differ\n"
            )
            print("| M ids/s | lookup | / torch | lookup and Adam step | / torch | 2,000 keys, p50 and p99 ms |")
            print("|---|---|---|---|---|---|")
            base = [statistics.median(each[ways[0].name]) for each in (lookups, steps)]
            for way in ways:
                rates = [statistics.median(each[way.name]) for each in (lookups, steps)]
                cells = [
                    f"{rates[0]:.2f} {quartiles(lookups[way.name])}",
                    f"{rates[0] / base[0]:.2f}",
                    f"{rates[1]:.2f} {quartiles(steps[way.name])}",
                    f"{rates[1] / base[1]:.2f}",
                ]
                times = small.get(way.name)
                cells.append(f"{statistics.median(times):.2f}, {p99_and_max(times)[0]:.2f}" if times else "")
                print(f"| {way.name} | {' | '.join(cells)} |")
        finally:
            for way in ways:
                if isinstance(way, Server):
                    way.close()
            for remote in servers:
                remote.close()


if __name__ == "__main__":
    main()

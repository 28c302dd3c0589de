"""An embedding table that grows to millions of rows at one parameter server: memory beside what was
predicted, and how long lookups wait.

    python -m benchmarks.table_size [--rows 50000000] [--ids 100000] [--dim 16] [--optimizer adagrad-row|adam]
    [--max-rows N]

One client pushes minibatches whose ids are all new; another, in a process of its own, looks up ids that are
there, all the time, and does not wait for versions: while rows change it is told so at once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import socket
import statistics
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.baselines import Remote
from benchmarks.dense_trireme import JOB, PserverProcess, new_loop
from benchmarks.measurements import p99_and_max

ASKED = 2000  # ids of a lookup
OPTIMIZERS = ("adagrad-row", "adam")


def table_spec(dim: int, optimizer: str, max_rows: int | None):
    from trireme_shared.protocol.records.layout import RowInit, RowOptimizer, TableSpec

    kind = (
        RowOptimizer(kind="adam", lr=0.01)
        if optimizer == "adam"
        else RowOptimizer(kind="adagrad", lr=0.05, per_row=True)
    )
    return TableSpec(
        name="t", dim=dim, seed=7, optimizer=kind, init=RowInit(kind="uniform", scale=0.01), max_rows=max_rows
    )


def ids_of(first: int, count: int) -> np.ndarray:
    """The ids numbered [first, first + count), in no order that a hash would see; ascending."""
    from trireme_shared.tables.hashing import mix64

    return np.sort(mix64(np.arange(first, first + count, dtype=np.uint64)).view(np.int64))


class Server(PserverProcess):
    """That tells, too, how long its event loop was held up."""

    def __init__(self, index: int, uds: str) -> None:
        from trireme_shared.serving.core.table.rows import TableRows

        super().__init__(index, uds)
        self._portions: list[float] = []
        steps = TableRows.steps

        def measured(rows: TableRows, *arguments):
            found = steps(rows, *arguments)
            while True:
                began = time.thread_time()
                try:
                    next(found)
                except StopIteration:
                    return
                finally:
                    self._portions.append(time.thread_time() - began)
                yield

        TableRows.steps = measured

    def portions(self) -> list[float]:
        """Seconds of work of each part of the steps since they were asked for."""
        found, self._portions = self._portions, []
        return found

    def pauses(self) -> tuple[list[float], list[float]]:
        """Seconds by which the loop came too late, and how much of each it worked itself: the rest it waited
        for a processor."""
        return self._lag.take_all()

    def resident(self) -> tuple[int, int]:
        """Bytes above those without rows, at the highest and now."""
        return self._memory.peak(), self._memory.now()


def tables_at(port: int) -> dict[str, int]:
    """What the parameter server tells of its table, by name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        name: int(float(value))
        for name, value in re.findall(r'trireme_pserver_table_(\w+)\{table="t"\} (\S+)', text)
    }


class Client:
    def __init__(self, uds: str, spec) -> None:
        from trainer_agent.data_plane.stream import StreamPserver
        from trireme_shared.protocol.records import PserverMember
        from trireme_shared.protocol.records.layout import Layout, OptimizerSpec, Segment

        optimizer = OptimizerSpec(name="SGD", defaults={}, groups=({"lr": 0.1},))
        segment = Segment(kind="param", dtype="float32", elements=64, group=0)
        self.spec, self.version = spec, 0
        self.layout = Layout(
            segments=(segment,), block_bytes=256, digest="d", optimizer=optimizer, tables=(spec,)
        )
        self._loop = new_loop()
        member = PserverMember(
            index=0,
            url="http://127.0.0.1:1",
            incarnation="ps",
            host=socket.gethostname(),
            pid=0,
            uds=f"{uds}-0",
        )
        self._port = StreamPserver(member, share=False)

    def init(self) -> None:
        from trireme_shared.protocol.records.step import LanePosition, StepRecord
        from trireme_shared.protocol.wire.messages import InitBlock, InitHeader

        async def blocks():
            yield InitBlock(block=0), memoryview(np.zeros(64, np.float32)).cast("B")

        record = StepRecord(version=0, positions=(LanePosition(lane=0),))
        header = InitHeader(
            job=JOB, generation=0, mode="sync", lanes=1, layout=self.layout, pserver=0, record=record
        )
        self._loop.run_until_complete(self._port.init(header, blocks()))

    def step(self, ids: np.ndarray, gradients: np.ndarray) -> None:
        self._loop.run_until_complete(self._step(ids, gradients))

    async def _step(self, ids: np.ndarray, gradients: np.ndarray) -> None:
        from trireme_shared.protocol.records.layout import ROWS
        from trireme_shared.protocol.records.step import LanePosition, LaneZero
        from trireme_shared.protocol.wire.messages import PullRequest, PushBlock, PushHeader
        from trireme_shared.tables.payload import joined

        header = PushHeader(
            job=JOB,
            generation=0,
            mode="sync",
            trainer="t",
            step=self.version,
            positions=(LanePosition(lane=0, offset=self.version + 1),),
            lane_zero=LaneZero(options=({"lr": 0.1},)),
        )

        async def blocks():
            yield PushBlock(block=0, lanes=(0, 1), count=1), memoryview(np.zeros(64, np.float32)).cast("B")
            yield PushBlock(block=ROWS, lanes=(0, 1), count=1, rows=(len(ids),)), joined([ids], [gradients])

        answer = await self._port.push(header, blocks())
        assert not answer.refused, answer
        self.version += 1
        request = PullRequest(job=JOB, generation=0, version=self.version, blocks=(0,), wait_s=60.0)
        end = await self._port.pull(request, lambda _: memoryview(bytearray(256)))
        assert end.code == "OK", end

    def lookup(self, ids: np.ndarray, version: int, wait_s: float = 0.0) -> tuple[str, np.ndarray | None]:
        """How it ended, and the rows."""
        from trireme_shared.protocol.wire.messages import LookupRequest
        from trireme_shared.tables.payload import joined, rows_in

        request = LookupRequest(job=JOB, generation=0, version=version, rows=(len(ids),), wait_s=wait_s)
        end, rows = self._loop.run_until_complete(self._port.lookup(request, joined([ids])))
        return end.code, rows_in(rows, (len(ids),), [self.spec.dim], ids=False)[
            0
        ] if end.code == "OK" else None

    def close(self) -> None:
        self._loop.run_until_complete(self._port.close())
        self._loop.close()


class Reader:
    """Looks up ids of the first minibatch, in a thread of its own process. `version`: the newest one, shared
    with who pushes."""

    def __init__(self, uds: str, spec, version) -> None:
        self._client, self._version, self._stop = Client(uds, spec), version, threading.Event()
        self._seconds: dict[str, list[float]] = {}
        self._ids = ids_of(0, ASKED)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.001):
            began = time.perf_counter()
            code, _ = self._client.lookup(self._ids, self._version.value)
            self._seconds.setdefault(code, []).append(time.perf_counter() - began)

    def stop(self) -> dict[str, list[float]]:
        """Seconds of the lookups, by how they ended."""
        self._stop.set()
        self._thread.join(30)
        return self._seconds


@dataclass
class Report:
    predicted: int = 0
    peak: int = 0
    rows: int = 0
    table_bytes: int = 0
    seconds: float = 0.0
    lookups: dict[str, list[float]] = field(default_factory=dict)
    lags: list[float] = field(default_factory=list)
    worked: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    portions: list[float] = field(default_factory=list)

    def text(self) -> str:
        lines = [
            (
                f"{self.rows:,} rows: predicted at most {self.predicted / 1e9:.2f} GB, "
                f"{self.peak / 1e9:.2f} GB were taken ({self.peak / self.rows:.1f} bytes a row)"
            ),
            (
                f"{len(self.steps)} steps in {self.seconds:.0f} s, median "
                f"{statistics.median(self.steps) * 1e3:.0f} ms"
            ),
            (
                "event loop too late, ms, p99 and most: {:.1f}, {:.1f}; of that its own work {:.1f}, {:.1f}"
            ).format(*(1e3 * each for values in (self.lags, self.worked) for each in p99_and_max(values))),
        ]
        p99, most = p99_and_max(self.portions)
        lines.append(
            f"parts of steps between which lookups are answered, ms of work: p99 {p99 * 1e3:.1f}, "
            f"most {most * 1e3:.1f}"
        )
        for code, seconds in sorted(self.lookups.items()):
            p99, most = p99_and_max(seconds)
            lines.append(
                f"{len(seconds)} lookups {code}: ms p50 {statistics.median(seconds) * 1e3:.1f}, "
                f"p99 {p99 * 1e3:.1f}, most {most * 1e3:.1f}"
            )
        return "\n".join(lines)


def grow(rows: int, ids: int, dim: int, optimizer: str, max_rows: int | None = None, tell=print) -> Report:
    """All minibatches; values of the rows are checked now and then."""
    from trireme_shared.tables.needs import needs_of

    spec = table_spec(dim, optimizer, max_rows)
    found = Report(predicted=needs_of(spec, min(rows, max_rows or rows), ids).total)
    tell(needs_of(spec, min(rows, max_rows or rows), ids).text())
    with tempfile.TemporaryDirectory() as folder:
        uds = str(Path(folder) / "ps")
        server, version = Remote(Server, 0, f"{uds}-0"), multiprocessing.get_context("spawn").Value("q", 0)
        port = server.ask("start")
        client, reader = Client(uds, spec), None
        try:
            client.init()
            gradients = np.random.default_rng(0).standard_normal((ids, dim)).astype(np.float32)
            client.step(ids_of(0, ids), gradients)  # compiles
            version.value = 1
            server.ask("pauses")
            server.ask("portions")
            reader = Reader(uds, spec, version)
            reader.start()
            began = time.perf_counter()
            for number in range(1, rows // ids):
                some = ids_of(number * ids, ids)
                start = time.perf_counter()
                client.step(some, gradients)
                found.steps.append(time.perf_counter() - start)
                version.value = client.version
                if number % 50 == 0:
                    facts = tables_at(port)
                    tell(
                        f"{facts['rows']:,} rows, {server.ask('resident')[0] / 1e9:.2f} GB at the "
                        f"highest; step {statistics.median(found.steps[-50:]) * 1e3:.0f} ms"
                    )
            found.seconds = time.perf_counter() - began
            found.lookups = reader.stop()
            found.lags, found.worked = server.ask("pauses")
            found.portions = server.ask("portions")
            facts = tables_at(port)
            found.rows, found.table_bytes = facts["rows"], facts["bytes"]
            found.peak = server.ask("resident")[0]
        finally:
            client.close()
            server.close()
    tell(found.text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=50_000_000)
    parser.add_argument("--ids", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=OPTIMIZERS[0])
    parser.add_argument("--max-rows", type=int)
    options = parser.parse_args()
    grow(options.rows, options.ids, options.dim, options.optimizer, options.max_rows)


if __name__ == "__main__":
    main()

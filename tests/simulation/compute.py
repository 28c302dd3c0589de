"""A model of a few hundred numbers that makes every protocol mistake visible in its parameters.

Each block of parameters is [one element per record | mixed elements]:
- the element of record r has gradient -1/n in a minibatch of n records that holds r, whatever the parameters
  are: after training with plain SGD it says how often r was applied to *this* block;
- the mixed elements' gradient depends on every parameter, the records and the random seed, so that a mixture
  of versions, a lost or a doubled contribution changes bits everywhere.
A segment of buffers follows the rule for buffers (mean over lanes), and only some minibatches change it; a
segment of integers lane 0's. In asynchronous mode each integer counts the records of every minibatch that was
applied.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.simulation.rows import SLOTS, PinnedRows, gradients_of, ids_of, no_rows, sum_of, table_of
from trainer_agent.model.compute import NOTHING_BEFORE, BeforeStep, BlockSink, LaneResult, Ready, Records
from trainer_agent.tables.files import StoredTable
from trainer_agent.tables.trained import Lookup
from trainer_agent.waiting import to_its_end
from trireme_shared.blocks.buffer_mean import add_changes, combine_buffers
from trireme_shared.blocks.buffers import DTYPES
from trireme_shared.protocol.lanes import Interval, combine
from trireme_shared.protocol.metrics import Logged
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.job_choices import Narrow, Transported
from trireme_shared.protocol.records.layout import Block, Layout, OptimizerSpec, Segment
from trireme_shared.protocol.records.step import LaneZero
from trireme_shared.tables.grouping import grouped
from trireme_shared.tables.lanes import LaneRows

RECORD_SLOTS = 48
BLOCK_ELEMENTS = 64
BLOCK_BYTES = 4 * BLOCK_ELEMENTS
PARAM_BLOCKS = 5
INTEGERS, INTEGER_BLOCK = 8, PARAM_BLOCKS + 1
RATE = 0.25  # a power of two, so that counting by records is exact enough to read

_DTYPES = {"float32": np.float32, "int64": np.int64}


def layout(mode: Mode, *, tables: bool = False) -> Layout:
    momentum = 0.9 if mode is Mode.SYNC else 0.0
    options = {"lr": RATE, "momentum": momentum, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
    return Layout(
        segments=(
            Segment(kind="param", dtype="float32", elements=3 * BLOCK_ELEMENTS, group=0),
            Segment(kind="param", dtype="float32", elements=2 * BLOCK_ELEMENTS, group=1),
            Segment(kind="buffer", dtype="float32", elements=24),
            Segment(kind="buffer", dtype="int64", elements=INTEGERS),
        ),
        block_bytes=BLOCK_BYTES,
        digest=hashlib.sha256(b"simulated").hexdigest(),
        optimizer=OptimizerSpec(name="SGD", defaults=options, groups=(options, {**options, "lr": RATE})),
        slot_count=SLOTS,
        tables=(table_of(mode),) if tables else (),
    )


@dataclass
class Trace:
    """What the computes of one cluster did, for the invariants. `pinned`: versions that were evaluated while
    an asynchronous job trained."""

    gradients: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    evaluated: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    validated: int = 0
    pinned: dict[bytes, tuple[list[np.ndarray[Any, Any]], PinnedRows | None]] = field(default_factory=dict)
    exported: list[bytes] = field(default_factory=list)
    best: list[bytes] = field(default_factory=list)


@dataclass(frozen=True)
class Speed:
    """Seconds a minibatch takes: uniform in [low, high], now and then `stall` more."""

    low_s: float = 0.01
    high_s: float = 0.03
    stall: float = 0.0
    stall_s: float = 2.0

    def draw(self, rng: random.Random) -> float:
        seconds = rng.uniform(self.low_s, self.high_s)
        return seconds + rng.random() * self.stall_s if rng.random() < self.stall else seconds


def result_of_lane(seed: int, names: Sequence[int]) -> LaneResult:
    """Numbers that round differently in another order, and a metric that not all minibatches have."""
    if not names:
        return LaneResult(0.0, 0)
    rng = random.Random(seed)
    loss, logged = rng.random() / 3, rng.random() * 1e6 / 7
    metrics = {"logged": Logged(logged, 1.0, logged, logged)} if sum(names) % 3 else {}
    return LaneResult(loss * len(names), len(names), 0, metrics)


def names_of(records: Records | None) -> tuple[int, ...]:
    return tuple(int(record["name"]) for record in records or ())


class TinyCompute:
    """trainer_agent.model.compute.Compute on numpy."""

    is_finished = by_columns = False
    places: Sequence[Any] = ()

    def __init__(
        self,
        mode: Mode,
        trace: Trace,
        rng: random.Random,
        speed: Speed,
        travels_as: Transported = "float32",
        schedule: str = "none",
        *,
        tables: bool = False,
        names_rows: bool = False,
    ) -> None:
        self._names_rows = names_rows
        self._mode, self._layout = mode, layout(mode, tables=tables)
        self._lookup: Lookup | None = None
        self._lane_rows = no_rows(mode)
        self._travels_as = travels_as
        self._payloads = self._layout.payloads(travels_as)
        self._sent: dict[tuple[Interval, int], torch.Tensor] = {}
        self._blocks = list(self._layout.blocks())
        self._trace, self._rng, self._speed = trace, rng, speed
        self._vectors = [self._initial(), self._initial()]
        self._model = self._vectors[0]  # what forward passes see
        self._lanes: dict[int, tuple[list[np.ndarray[Any, Any]], int]] = {}
        self._nodes: dict[Interval, list[np.ndarray[Any, Any]]] = {}
        self._steps_begun, self._rate, self._least = 0, RATE, math.inf
        self._schedule = schedule
        self._pinned: list[np.ndarray[Any, Any]] | None = None
        self._pinned_rows: PinnedRows | None = None
        self._result = LaneResult(0.0, 0)

    def _initial(self) -> list[np.ndarray[Any, Any]]:
        return [
            (np.linspace(-1, 1, s.elements) if s.dtype == "float32" else np.arange(s.elements)).astype(
                _DTYPES[s.dtype]
            )
            for s in self._layout.segments
        ]

    @property
    def layout(self) -> Layout:
        return self._layout

    def _view(self, vectors: Sequence[np.ndarray[Any, Any]], number: int) -> memoryview:
        block = self._blocks[number]
        return vectors[block.segment][block.first : block.first + block.elements].view(np.uint8).data

    def current(self, block: int) -> memoryview:
        return self._view(self._vectors[0], block)

    def staging(self, block: int) -> memoryview:
        return self._view(self._vectors[1], block)

    def widen(self, block: int, dtype: Narrow, payload: memoryview) -> None:
        narrow = torch.frombuffer(payload, dtype=DTYPES[dtype])
        self.staging(block)[:] = narrow.float().numpy().view(np.uint8).data

    def keep(self, block: int) -> None:
        self.staging(block)[:] = self.current(block)

    def swap(self) -> None:
        self._vectors.reverse()
        self.use_current()

    @property
    def may_initialise(self) -> bool:
        return True

    def initial_state(self, block: int) -> Sequence[tuple[str, memoryview]]:
        return ()

    def initial_lane_zero(self) -> LaneZero:
        return self._lane_zero()

    def begin_step(self, before: BeforeStep = NOTHING_BEFORE) -> LaneZero:
        """The rate is halved after each epoch, or when an evaluation's value was not below all before."""
        self._steps_begun += 1
        if self._schedule == "epoch" and before.epoch_ended:
            self._rate /= 2
        if self._schedule == "plateau" and before.metric is not None:
            self._rate /= 1 if before.metric < self._least else 2
            self._least = min(before.metric, self._least)
        return self._lane_zero()

    def restore(self, lane_zero: LaneZero) -> None:
        self._steps_begun, self._rate, least = (
            lane_zero.scheduler[name] for name in ("steps", "rate", "least")
        )
        self._least = float(least)

    def _lane_zero(self) -> LaneZero:
        # JSON has no infinity
        state = {"steps": self._steps_begun, "rate": self._rate, "least": str(self._least)}
        return LaneZero(options=({"lr": self._rate}, {"lr": self._rate}), scheduler=state)

    async def prepare(self, seed: int, records: Records) -> Ready | None:
        return Ready([grouped(ids_of(names_of(records), self._mode))], seed) if self._names_rows else None

    async def gradient(
        self,
        node: Interval,
        lane: int,
        seed: int,
        records: Records | None,
        sink: BlockSink,
        ready: Ready | None = None,
    ) -> LaneResult:
        names, of_rows, self._lane_rows = names_of(records), 0.0, no_rows(self._mode)
        if self._lookup is not None and names:
            assert (ready.batch if ready is not None else None) == (seed if self._names_rows else None)
            (rows,) = ready.rows if ready is not None else await self._lookup([ids_of(names, self._mode)])
            of_rows, self._lane_rows = sum_of(rows), gradients_of(self._mode, self._model, rows, seed, names)
        found = gradients(self._model, seed, names, of_rows)
        if self._mode is Mode.ASYNC:  # what was added to the integers
            found[3] = found[3] - self._vectors[0][3] if names else found[3]
        self._lanes[lane] = (found, len(names))
        self._result = result_of_lane(seed, names)
        await to_its_end(asyncio.sleep(self._speed.draw(self._rng) if names else 0.001))  # as a thread
        if names:
            self._trace.gradients.append((seed, names))
        if lane == node[1] - 1:
            integers = add_changes if self._mode is Mode.ASYNC else combine
            self._nodes[node] = mean_over(node, self._lanes, self._travels_as, integers)
            order = [block.number for block in self._blocks]
            self._rng.shuffle(order)
            for block in order:
                if self._rng.random() < 0.3:
                    await asyncio.sleep(0.001)
                sink.done(block)
        return self._result

    def read_rows(self, lookup: Lookup) -> None:
        self._lookup = lookup

    def lane_rows(self) -> Sequence[LaneRows]:
        return (self._lane_rows,)

    def result(self) -> LaneResult:
        return self._result

    def samples(self, node: Interval) -> int:
        return sum(self._lanes[lane][1] for lane in range(*node))

    def contribution(self, node: Interval, block: int) -> memoryview:
        dtype, own = self._payloads[block], self._view(self._nodes[node], block)
        if dtype is None:
            buffer = self._mode is Mode.SYNC and self._blocks[block].segment == 2
            # forward left it as it was
            return memoryview(b"") if buffer and own == self.current(block) else own
        sent = self._sent[node, block] = torch.frombuffer(own, dtype=torch.float32).to(DTYPES[dtype])
        memory: memoryview = sent.view(torch.uint8).numpy().data
        return memory

    def forget_nodes(self) -> None:
        for sent in self._sent.values():
            sent.fill_(77)
        self._sent.clear()
        for vectors in self._nodes.values():  # a late reader must see garbage, not luck
            for vector in vectors:
                vector.fill(77)
        self._nodes.clear()

    async def evaluate(self, records: Records, seed: int = 0, *, pinned: bool = False) -> dict[str, float]:
        names = names_of(records)
        if pinned:
            return await self._validate(names, seed)
        await asyncio.sleep(self._speed.draw(self._rng))
        self._trace.evaluated.append((hashlib.sha256(_bytes_of(self._vectors[0])).hexdigest(), names))
        return {"records": float(len(names)), "total": float(sum(names))}

    async def _validate(self, names: tuple[int, ...], seed: int) -> dict[str, float]:
        """As TorchCompute does it: the model has the pinned values meanwhile."""
        assert self._pinned is not None, "evaluated without a checkpoint"
        self._model = self._pinned
        try:
            await asyncio.sleep(self._speed.draw(self._rng))
            self._trace.validated += 1
            seen, rows = self._model, self._pinned_rows
            if self._mode is Mode.ASYNC:
                self._trace.pinned.setdefault(_bytes_of(seen), ([*map(np.copy, seen)], rows))
            return validation(seen, seed, names, sum_of(rows.lookup(names)) if rows else 0.0)
        finally:
            self.use_current()

    def use_current(self) -> None:
        self._model = self._vectors[0]

    def pinned(self, block: int) -> memoryview:
        if self._pinned is None:
            self._pinned = self._initial()
        return self._view(self._pinned, block)

    def pin_rows(self, tables: Sequence[StoredTable]) -> None:
        self._pinned_rows = PinnedRows(tables, self._mode)

    def forget_pinned(self) -> None:
        self._pinned = self._pinned_rows = None

    async def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return metrics(sums)

    async def export(self, directory: str) -> dict[str, str]:
        await asyncio.sleep(self._speed.draw(self._rng))
        (self._trace.best if directory.endswith("best") else self._trace.exported).append(
            _bytes_of(self._vectors[0])
        )
        return {"numbers": f"{directory}/numbers"}

    async def finish(self) -> None:
        pass


def _bytes_of(vectors: Sequence[np.ndarray[Any, Any]]) -> bytes:
    return b"".join(vector.tobytes() for vector in vectors)


def gradients(
    params: Sequence[np.ndarray[Any, Any]], seed: int, names: Sequence[int], of_rows: float = 0.0
) -> list[np.ndarray[Any, Any]]:
    """One minibatch's mean gradient of every segment; for buffers the values after the forward pass.
    `of_rows`: of the embedding table."""
    if not names:
        return [np.zeros_like(vector) for vector in params]
    total = np.float32(
        math.fsum(params[0].tolist())
        + math.fsum(params[1].tolist())
        + math.fsum(params[2].tolist())
        + of_rows
    )
    noise = np.sin(
        np.arange(BLOCK_ELEMENTS - RECORD_SLOTS, dtype=np.float32) * np.float32(seed % 89 + sum(names))
    )
    result: list[np.ndarray[Any, Any]] = []
    for vector in params[:2]:
        gradient = np.zeros((len(vector) // BLOCK_ELEMENTS, BLOCK_ELEMENTS), np.float32)
        for name in names:
            gradient[:, name % RECORD_SLOTS] -= np.float32(1 / len(names))
        mixed = vector.reshape(-1, BLOCK_ELEMENTS)[:, RECORD_SLOTS:]
        gradient[:, RECORD_SLOTS:] = (
            mixed * np.float32(0.1) + noise * np.float32(0.3) + total * np.float32(0.001)
        )
        result.append(gradient.reshape(-1))
    moved = (params[2] * np.float32(0.9) + np.float32(0.01) * np.float32(sum(names) % 11)).astype(np.float32)
    result.append(params[2].copy() if sum(names) % 4 else moved)
    result.append(params[3] + len(names))
    return result


def validation(
    params: Sequence[np.ndarray[Any, Any]], seed: int, names: Sequence[int], of_rows: float = 0.0
) -> dict[str, float]:
    """Sums over a minibatch that is evaluated; `value` depends on the parameters, the buffers, the rows and
    the seed."""
    mixed = (
        math.fsum(math.fsum(vector.tolist()) * (number + 1) for number, vector in enumerate(params)) + of_rows
    )
    value = mixed * (1.0 + sum(names)) / 7.0 + seed % 13
    return {"records": float(len(names)), "total": float(sum(names)), "value": value}


def metrics(sums: Mapping[str, float]) -> dict[str, float]:
    return {name: sums[name] / sums["records"] for name in sums if name != "records"}


def rounded(vectors: Sequence[np.ndarray[Any, Any]], travels_as: Transported) -> list[np.ndarray[Any, Any]]:
    """As they are after travelling: the two segments of parameters are cast, there and back."""
    dtype = DTYPES[travels_as]
    return [
        torch.from_numpy(vector).to(dtype).float().numpy() if index < 2 else vector
        for index, vector in enumerate(vectors)
    ]


def mean_over(
    node: Interval,
    lanes: Mapping[int, tuple[list[np.ndarray[Any, Any]], int]],
    travels_as: Transported = "float32",
    integers: Callable[..., tuple[torch.Tensor, int]] = combine,
) -> list[np.ndarray[Any, Any]]:
    """The canonical tree over lanes [first, last) of (gradients, count), rounded at every node."""

    def tree(first: int, last: int) -> tuple[list[torch.Tensor], int]:
        if last - first == 1:
            vectors, count = lanes[first]
            return [torch.from_numpy(vector.copy()) for vector in rounded(vectors, travels_as)], count
        middle = (first + last) // 2
        left, left_count = tree(first, middle)
        right, right_count = tree(middle, last)
        kinds = (combine, combine, combine_buffers, integers)
        pairs = [mean(a, left_count, b, right_count) for mean, a, b in zip(kinds, left, right, strict=True)]
        means = rounded([vector.numpy() for vector, _ in pairs], travels_as)
        return [torch.from_numpy(mean) for mean in means], left_count + right_count

    return [vector.numpy() for vector in tree(*node)[0]]


def param_blocks() -> list[Block]:
    return [block for block in layout(Mode.SYNC).blocks() if block.segment < 2]


def applied_of(exported: bytes, block: Block, initial: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Per record slot: the sum of 1/n over the minibatches (of n records) applied to this block."""
    first = (block.first + (3 * BLOCK_ELEMENTS if block.segment else 0)) * 4
    values = np.frombuffer(exported, np.float32, RECORD_SLOTS, offset=first)
    return (values - initial[block.first : block.first + RECORD_SLOTS]) / np.float32(RATE)

"""What a synchronous checkpoint costs: python -m benchmarks.checkpoint [--mib 64 256] [--optimizers SGD Adam]
[--folder DIR] [--batch 128] [--rounds 8] [--quiet 5] [--markdown | --json]

pause      a step whose version is copied against one that is not, in a parameter server's core, without
           network; beside it the time to copy the same state (values and optimizer) into memory that was
           touched before
write      a part (checksum, fsync, rename) against a plain write and fsync of as many bytes (through the page
           cache or past it, whichever was faster), alone and beside steps
slow-down  steps beside the writing of a part against steps without, of a trainer that computes (one thread; a
           residual network with that many parameters) and of one that only exchanges (the same gradients
           again and again)

bare       the same beside a bare loop that writes as many bytes past the page cache: what this machine makes
           of any write

Rounds of all kinds alternate; each has its own steps without a write, write, and plain write. Medians and
quartiles of rounds are shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import uvloop

from benchmarks.checkpoint_steps import Measured, Round, Steps, slow_downs
from benchmarks.spread import quartiles
from trireme_shared.blocks.buffers import bytes_of
from trireme_shared.checkpoints.schedule import Schedule
from trireme_shared.platform.runtime import telemetry
from trireme_shared.platform.runtime.process_setup import optimizers_without_compiler
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.layout import Layout, OptimizerSpec, Segment
from trireme_shared.protocol.records.step import LanePosition, LaneZero, StepRecord
from trireme_shared.protocol.wire.messages import InitHeader, PushBlock, PushHeader
from trireme_shared.serving.core.stores import store_of

JOB = "benchmark"
OPTIMIZERS = {"SGD": {"lr": 0.01}, "Adam": {"lr": 0.01, "fused": True}}
PAUSES = 12
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Spread:
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        low, median, high = quartiles(values)
        return cls(median, low, high)

    def shown(self, form: str, scale: float = 1.0) -> str:
        return f"{self.median * scale:{form}} ({self.low * scale:{form}} to {self.high * scale:{form}})"


@dataclass(frozen=True)
class Beside:
    """Steps of one kind. `lost_s`: by one checkpoint, its copying included."""

    step_s: Spread
    slow_down: Spread
    lost_s: Spread
    mib_per_s: Spread
    to_plain: Spread
    bare_slow_down: Spread
    bare_mib_per_s: Spread

    @classmethod
    def of(cls, rounds: Sequence[Round], bare: Sequence[Round]) -> Beside:
        return cls(
            Spread.of([one.step_s for one in rounds]),
            Spread.of(slow_downs(rounds)),
            Spread.of([one.lost_s for one in rounds]),
            Spread.of([one.part.mib_per_s for one in rounds]),
            Spread.of([one.part.mib_per_s / one.plain_mib_per_s for one in rounds]),
            Spread.of(slow_downs(bare)),
            Spread.of([one.part.mib_per_s for one in bare]),
        )


@dataclass(frozen=True)
class Row:
    parameters_mib: int
    optimizer: str
    part_mib: int
    pause_s: float
    copy_s: float
    plain_mib_per_s: Spread
    alone_mib_per_s: float
    training: Beside
    exchanging: Beside


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mib", type=int, nargs="+", default=[64, 256], help="of parameters, multiples of 16"
    )
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to write")
    parser.add_argument("--batch", type=int, default=128, help="records of a step")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--quiet", type=int, default=5, help="steps of a round without a write (exchanging: twice as many)"
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--markdown", action="store_true", help="the default")
    shape.add_argument("--json", action="store_true")
    given = parser.parse_args()
    telemetry.configure(level="ERROR", json=False)
    torch.set_num_threads(1)
    optimizers_without_compiler()
    with tempfile.TemporaryDirectory(prefix="trireme-", dir=given.folder) as folder:
        rows = [
            measure(mib, optimizer, given.batch, given.rounds, given.quiet, Path(folder))
            for mib in given.mib
            for optimizer in given.optimizers
        ]
    print(json.dumps([asdict(row) for row in rows]) if given.json else tables(rows))


def measure(mib: int, optimizer: str, batch: int, rounds: int, quiet: int, folder: Path) -> Row:
    pause_s, copy_s = pauses(layout_of(mib, optimizer))
    _COPY.clear()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(Steps(mib, optimizer, batch, folder).measure(rounds, quiet))
    return row_of(mib, optimizer, pause_s, copy_s, found)


def row_of(mib: int, optimizer: str, pause_s: float, copy_s: float, found: Measured) -> Row:
    return Row(
        parameters_mib=mib,
        optimizer=optimizer,
        part_mib=round(found.alone[-1].size / 2**20),
        pause_s=pause_s,
        copy_s=copy_s,
        plain_mib_per_s=Spread.of([one.plain_mib_per_s for one in found.training]),
        alone_mib_per_s=statistics.median(part.mib_per_s for part in found.alone),
        training=Beside.of(found.training, found.bare_training),
        exchanging=Beside.of(found.exchanging, found.bare_exchanging),
    )


def layout_of(mib: int, optimizer: str) -> Layout:
    spec = OptimizerSpec(name=optimizer, defaults={}, groups=(OPTIMIZERS[optimizer],))
    segment = Segment(kind="param", dtype="float32", elements=mib << 18, group=0)
    return Layout(segments=(segment,), block_bytes=BLOCK_BYTES, digest="d", optimizer=spec)


def init_header(layout: Layout) -> InitHeader:
    record = StepRecord(version=0, positions=(LanePosition(lane=0),))
    return InitHeader(job=JOB, generation=0, mode=Mode.SYNC, lanes=1, layout=layout, pserver=0, record=record)


def push_header(layout: Layout, step: int) -> PushHeader:
    return PushHeader(
        job=JOB,
        generation=1,
        mode=Mode.SYNC,
        trainer="t",
        step=step,
        positions=(LanePosition(lane=0, index=step),),
        lane_zero=LaneZero(options=layout.optimizer.groups),
    )


def gradients(layout: Layout) -> dict[int, memoryview]:
    return {block.number: bytes_of(torch.full((block.elements,), 0.5)) for block in layout.blocks()}


# -------------------------------------------------------------------- the pause


def pauses(layout: Layout) -> tuple[float, float]:
    """(what a due version adds to a step, a copy of the state); every second version is due."""
    store = store_of(init_header(layout), Schedule(every_steps=2, every_epochs=None, epochs=1 << 30))
    pushed = gradients(layout)
    for block in layout.blocks():
        store.add_block(block.number, bytes_of(torch.zeros(block.elements)))
    store.seal()
    due, others, copies = [], [], []
    for step in range(2 * PAUSES):
        push = store.admit(push_header(layout, step))
        begin = time.perf_counter()
        for number, gradient in pushed.items():
            store.apply(push, PushBlock.model_construct(block=number, lanes=(0, 1), count=1), gradient)
        seconds = time.perf_counter() - begin
        (due if (step + 1) % 2 == 0 else others).append(seconds)
        if (snapshot := store.take_snapshot()) is not None:
            tensors = [saved.buffer.tensor for saved in snapshot.tensors.values()]
            copies.append(copy_of(tensors))
            snapshot.release()
    warm = 2  # the first ones touch new memory
    added = statistics.median(d - o for d, o in zip(due[warm:], others[warm:], strict=True))
    return added, statistics.median(copies)


_COPY: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}


def copy_of(tensors: list[torch.Tensor]) -> float:
    """Seconds to copy them into memory of their own."""
    key = (sum(tensor.numel() for tensor in tensors), tensors[0].dtype)
    if key not in _COPY:
        _COPY.clear()
        _COPY[key] = [tensor.clone() for tensor in tensors]
    begin = time.perf_counter()
    for place, tensor in zip(_COPY[key], tensors, strict=True):
        place.copy_(tensor)
    return time.perf_counter() - begin


# -------------------------------------------------------------------- what was found


WRITES = (
    "| parameters | optimizer | part | copy | pause | / copy | plain write, MiB/s | part alone | / plain |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
STEPS = (
    "| parameters | optimizer | steps | without a write, ms | beside a write, slower | lost by a "
    "checkpoint, ms | written, MiB/s | / plain "
    "| beside bare writes, slower | written, MiB/s | part / bare |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def tables(rows: Sequence[Row]) -> str:
    writes, steps = [WRITES], [STEPS]
    for row in rows:
        named = f"| {row.parameters_mib} MiB | {row.optimizer} |"
        writes.append(
            f"{named} {row.part_mib} MiB | {row.copy_s * 1e3:.1f} ms | {row.pause_s * 1e3:.1f} ms "
            f"| {row.pause_s / row.copy_s:.2f} | "
            f"{row.plain_mib_per_s.shown('.0f')} | {row.alone_mib_per_s:.0f} MiB/s | "
            f"{row.alone_mib_per_s / row.plain_mib_per_s.median:.0%} |"
        )
        for kind, found in (("training", row.training), ("exchanging only", row.exchanging)):
            steps.append(
                f"{named} {kind} | {found.step_s.shown('.0f', 1e3)} | "
                f"{found.slow_down.shown('+.0%')} | {found.lost_s.shown('.0f', 1e3)} | "
                f"{found.mib_per_s.shown('.0f')} | {found.to_plain.shown('.0%')} | "
                f"{found.bare_slow_down.shown('+.0%')} | "
                f"{found.bare_mib_per_s.shown('.0f')} | "
                f"{found.mib_per_s.median / found.bare_mib_per_s.median:.0%} |"
            )
    return "\n".join([*writes, "", *steps])


if __name__ == "__main__":
    main()

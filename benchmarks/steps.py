"""Training steps per second: plain PyTorch, DDP over gloo (tuned, and by default), and ours, on real models
at the same global batch.

    python -m benchmarks.steps [--models charlm,mlp] [--rows plain,ddp,...] [--rounds 9] [--seconds 3]
    [--bind]
                               [--clip] [--markdown | --json]
    python -m benchmarks.steps --metrics [--models mlp] [--rounds 9] [--seconds 3]

--metrics: only what the metrics of steps and the bookkeeping of evaluations cost: synchronous jobs with and
without them, side by side, and the ratios of their steps/s, round by round. The job that is evaluated every
EVALUATED_EVERY steps has an evaluation set of two records, so that its checkpoint is written and read, and
its tasks and results go their way, and next to nothing is computed. It is compared with a job without
evaluations and checkpoints, and with one that writes its checkpoints just as often, which leaves the
bookkeeping.

Every row trains the same script in processes of its own, one torch thread each. All rows of a model are
started once and stopped (SIGSTOP); a round lets one after the other go on for a while, so rows of one round
share the machine's mood and ratios are taken round by round. Plain PyTorch and `ddp` run at their best
(torch_steps.TUNED, and glibc's tunables as ours have them), `ddp0` with torch's defaults; ratios are against
the faster one. An asynchronous step is a global batch of records applied at the parameter servers, so all
rows count the same records. `CPU ms`: processor time of a step, in all trainers (or ranks), parameter
servers, and the rest (etcd, master). `others' cores`: what everybody else on the machine took meanwhile;
ratios mean little if that is much. --clip compares our synchronous rows with the same ones that clip each
step's gradient by its norm (`clip_grad_norm`). --bind gives the trainers (or ranks) of each row a core each,
where the kernel would pack them.

A second table tells of our rows, measured after the rounds, how late the event loops were (99th percentile
and worst, woken every 2 ms; up to 1 ms is the loop's own clock) and, in brackets, the worst of it in which
the loop's thread worked and did not wait for a processor, and how much memory one process took above its
start, without others' memory that it reads, against their bounds. Activations: what plain PyTorch took at a
trainer's batch beyond parameters and gradients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.measurements import TRAINER_MIB
from benchmarks.spread import spread
from benchmarks.step_rows import (
    EVALUATED_EVERY,
    SETTLE_S,
    Inside,
    OurRow,
    Row,
    TorchRow,
    Window,
    activations_mib,
    bind,
    in_turns,
    send,
    stopped,
)
from trainer_agent.script import user_module
from trireme_shared.platform.runtime import telemetry

HERE = Path(__file__).resolve().parent
SCRIPTS = {"charlm": HERE.parent / "examples" / "charlm" / "charlm.py", "mlp": HERE / "scripts" / "mlp.py"}
BATCHES = {"charlm": 32, "mlp": 256}
STATE = {"charlm": 2, "mlp": 1}  # of the optimizer, in parameters
TITLES = {
    "plain": "plain PyTorch, 1 process",
    "ddp": "DDP over gloo, 2 ranks",
    "ddp0": "DDP over gloo, 2 ranks, as torch is by default",
    "sync1": "ours, sync, 2 trainers, 1 pserver",
    "sync2": "ours, sync, 2 trainers, 2 pservers",
    "clip1": "ours, sync, clipped, 2 trainers, 1 pserver",
    "clip2": "ours, sync, clipped, 2 trainers, 2 pservers",
    "bare1": "ours, sync, 2 trainers, 1 pserver, without metrics",
    "saved1": f"ours, sync, 2 trainers, 1 pserver, a checkpoint every {EVALUATED_EVERY} steps",
    "evaluated1": f"ours, sync, 2 trainers, 1 pserver, evaluated every {EVALUATED_EVERY} steps",
    "async1": "ours, async, 2 trainers, 1 pserver",
    "async2": "ours, async, 2 trainers, 2 pservers",
}
CLIPPED = {"clip1": "sync1", "clip2": "sync2"}  # row -> the same without clipping
CLIP = 0.1  # most gradients are longer
RANKS = {"plain": 1, "ddp": 2, "ddp0": 2}
METRICS = ("sync1", "bare1", "saved1", "evaluated1")


@dataclass
class Measured:
    """Of one row: each round's, and what was seen inside afterwards. Bounds in MiB, by role. `evaluations`:
    so many were over in the end."""

    row: str
    model: str
    windows: list[Window]
    inside: Inside | None
    bounds: dict[str, float]
    evaluations: int = 0


def row_of(name: str, model: str, folder: Path) -> Row:
    script, batch = SCRIPTS[model], BATCHES[model]
    if name in RANKS:
        return TorchRow(script, batch, RANKS[name], name != "ddp0", folder)
    clips = name.startswith("clip")
    return OurRow(
        script, batch, "sync" if clips else name[:-1], int(name[-1]), folder, CLIP if clips else None
    )


async def measure(
    model: str, names: Sequence[str], rounds: int, seconds: float, folder: Path, *, bound: bool
) -> list[Measured]:
    user_module.load(SCRIPTS[model]).dataset()  # writes the data, once
    inside: dict[str, Inside] = {}

    def told(number: int, name: str, window: Window) -> None:
        rate = f"{window.steps_per_s:.2f} steps/s"
        print(f"{model} round {number + 1}/{rounds}: {TITLES[name]}: {rate}", file=sys.stderr)

    async with AsyncExitStack() as stack:
        rows: dict[str, Row] = {}
        for name in names:
            rows[name] = await stopped(stack, row_of(name, model, folder / f"{model}-{name}"))
            if bound:
                bind(rows[name])
        windows = await in_turns(rows, rounds, seconds, told)
        for name, row in rows.items():
            if isinstance(row, OurRow):
                send(row, signal.SIGCONT)
                await asyncio.sleep(SETTLE_S)
                inside[name] = await row.inside(seconds)
                send(row, signal.SIGSTOP)
        evaluations = {name: row.evaluations for name, row in rows.items() if isinstance(row, OurRow)}
    return [
        Measured(name, model, windows[name], inside.get(name), bounds(name, model), evaluations.get(name, 0))
        for name in names
    ]


def bounds(name: str, model: str) -> dict[str, float]:
    """What one process may take above its start, in MiB (docs/performance.md). Two trainers, one lane
    each."""
    if name in RANKS:
        return {}
    sync = not name.startswith("async")
    user = user_module.load(SCRIPTS[model])
    mib = sum(parameter.nbytes for parameter in user.call("model").parameters()) / (1 << 20)
    batch = BATCHES[model] // 2 if sync else BATCHES[model]
    pserver = mib * (2 + STATE[model] + sync) / int(name[-1]) + 64
    return {"trainers": 3 * mib + activations_mib(SCRIPTS[model], batch) + TRAINER_MIB, "pservers": pserver}


# ------------------------------------------------------------ tables


HEAD = (
    "| model | what | steps/s | x plain | x DDP | CPU ms: trainers + pservers + rest | others' cores "
    "|\n|---|---|---|---|---|---|---|"
)
HEAD_INSIDE = (
    "\n| model | what | pservers' loops late, p99-worst (own) ms | trainers' loops late | pserver "
    "MiB | bound | trainer MiB | bound |\n"
    "|---|---|---|---|---|---|---|---|"
)


def fastest(rates: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    """ "" if none of them was measured."""
    return max(
        (name for name in names if name in rates), key=lambda name: statistics.median(rates[name]), default=""
    )


def table(rows: Sequence[Measured]) -> str:
    rates = {row.row: [window.steps_per_s for window in row.windows] for row in rows}
    bases = [fastest(rates, [name for name, ranks in RANKS.items() if ranks == each]) for each in (1, 2)]
    lines = []
    for row in rows:
        ratios = [
            spread([a / b for a, b in zip(rates[row.row], rates[base], strict=True)]) if base else ""
            for base in bases
        ]
        cpu = [
            f"{statistics.median(window.cpu_ms[role] for window in row.windows):.0f}"
            for role in row.windows[0].cpu_ms
        ]
        foreign = f"{statistics.median(window.foreign_cores for window in row.windows):.2f}"
        cells = (row.model, TITLES[row.row], spread(rates[row.row]), *ratios, " + ".join(cpu), foreign)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def inside_table(rows: Sequence[Measured]) -> str:
    lines = []
    for row in rows:
        if row.inside is None:
            continue
        late = [
            "{:.1f}-{:.1f} ({:.1f})".format(*row.inside.lag_ms[role], row.inside.own_ms[role])
            for role in ("pservers", "trainers")
        ]
        memory = [
            f"{mib[role]:.0f}" for role in ("pservers", "trainers") for mib in (row.inside.mib, row.bounds)
        ]
        lines.append(f"| {' | '.join((row.model, TITLES[row.row], *late, *memory))} |")
    return "\n".join(lines)


def clip_table(rows: Sequence[Measured]) -> str:
    """Steps of rows that clip, by those of the same row that does not, of the same round."""
    rates = {(row.model, row.row): [window.steps_per_s for window in row.windows] for row in rows}
    lines = ["\n| model | what | x without clipping |", "|---|---|---|"]
    for (model, name), clipped in rates.items():
        if plain := rates.get((model, CLIPPED.get(name, ""))):
            ratios = [a / b for a, b in zip(clipped, plain, strict=True)]
            lines.append(f"| {model} | {TITLES[name]} | {spread(ratios)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def metrics_lines(rows: Mapping[str, Measured]) -> str:
    """The ratios of each round, and what they mean. Raises RuntimeError if the row that should be was never
    evaluated."""
    rates = {name: [window.steps_per_s for window in rows[name].windows] for name in METRICS}
    evaluated = rows["evaluated1"]
    if not evaluated.evaluations:
        raise RuntimeError(
            f"{TITLES[evaluated.row]}: no evaluation was over; measure longer (--seconds, --rounds)"
        )
    lines = [""]
    for name, base, what in (
        ("sync1", "bare1", "with metrics / without"),
        ("evaluated1", "sync1", "evaluated / neither evaluated nor saved"),
        ("saved1", "sync1", "saved as often / not saved"),
        ("evaluated1", "saved1", "evaluated / saved as often: the bookkeeping"),
    ):
        ratios = [a / b for a, b in zip(rates[name], rates[base], strict=True)]
        lines.append(f"{evaluated.model}: steps/s {what}: {spread(ratios, 3)}")
    return "\n".join([*lines, f"{evaluated.model}: {evaluated.evaluations} evaluations in all rounds"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(SCRIPTS))
    usual = [name for name in TITLES if name not in CLIPPED and name not in METRICS[1:]]
    parser.add_argument("--rows", default=",".join(usual))
    parser.add_argument("--clip", action="store_true", help="the rows sync1, clip1, sync2, clip2")
    parser.add_argument("--metrics", action="store_true", help="what metrics and evaluations cost")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=3.0, help="measured per row and round")
    parser.add_argument(
        "--bind", action="store_true", help="a core each for the trainers (or ranks) of a row"
    )
    parser.add_argument("--markdown", action="store_true", help="the default")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    names, models = given.rows.split(","), given.models.split(",")
    if given.clip:
        names = [name for pair in CLIPPED.items() for name in reversed(pair)]
    if given.metrics:
        names = list(METRICS)
    if unknown := [name for name in (*names, *models) if name not in {*TITLES, *SCRIPTS}]:
        parser.error(
            f"unknown: {', '.join(unknown)}; rows are {', '.join(TITLES)}, models {', '.join(SCRIPTS)}"
        )
    rows: list[Measured] = []
    telemetry.configure(level="ERROR", json=False)  # stdout is the table's; stopped jobs have stopped etcds
    with tempfile.TemporaryDirectory() as directory:
        os.environ["STEPS_DATA"] = directory
        for model in models:
            rows += asyncio.run(
                measure(model, names, given.rounds, given.seconds, Path(directory), bound=given.bind)
            )
    if given.json:
        machine = {
            "cpus": os.cpu_count(),
            "machine": platform.platform(),
            "python": platform.python_version(),
        }
        print(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1))
        return
    print(HEAD)
    for model in models:
        print(table([row for row in rows if row.model == model]))
    if given.metrics:
        for model in models:
            print(metrics_lines({row.row: row for row in rows if row.model == model}))
        return
    print(f"{HEAD_INSIDE}\n{inside_table(rows)}")
    print(clip_table(rows))


if __name__ == "__main__":
    main()

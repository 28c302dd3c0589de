"""Whole jobs: steps/s of the collective strategy beside DistributedDataParallel over Gloo with the same
model, global batch and threads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.collective.exchange import progress
from benchmarks.spread import spread
from benchmarks.step_rows import OurRow, Row, TorchRow, Window, in_turns, stopped
from benchmarks.steps import BATCHES, SCRIPTS
from trainer_agent.script import user_module

TITLES = {
    "ddp": "DDP over Gloo",
    "ours": "collective, direct exchange",
    "native": "collective, native exchange, canonical",
    "native-fast": "collective, native exchange, fast",
}
NATIVE = {"native": {"exchange": "native"}, "native-fast": {"exchange": "native", "reduction": "fast"}}
HEAD = (
    "| model | members | what | steps/s | x DDP | CPU ms of a step: members + rest | others' cores "
    "|\n|---|---|---|---|---|---|---|"
)


def row_of(name: str, model: str, members: int, folder: Path) -> Row:
    script, batch = SCRIPTS[model], BATCHES[model]
    if name == "ddp":
        return TorchRow(script, batch, members, True, folder)
    return OurRow(script, batch, "collective", 0, folder, trainers=members, more=NATIVE.get(name, {}))


async def measure(
    model: str, members: int, rounds: int, seconds: float, folder: Path
) -> dict[str, list[Window]]:
    """All rows are started once and stopped; a round lets one after the other go on."""
    user_module.load(SCRIPTS[model]).dataset()  # writes the data, once

    def told(number: int, name: str, _: Window) -> None:
        progress(f"{model}, {members} members, round {number + 1}/{rounds}: {TITLES[name]}")

    async with AsyncExitStack() as stack:
        rows = {
            name: await stopped(stack, row_of(name, model, members, folder / f"{model}-{name}-{members}"))
            for name in TITLES
        }
        return await in_turns(rows, rounds, seconds, told)


def table(model: str, members: int, found: dict[str, list[Window]]) -> str:
    lines = []
    for name, windows in found.items():
        rates = [window.steps_per_s for window in windows]
        ratios = [a.steps_per_s / b.steps_per_s for a, b in zip(windows, found["ddp"], strict=True)]
        first, *rest = (spread([w.cpu_ms[role] for w in windows], 0) for role in windows[0].cpu_ms)
        others = spread([window.foreign_cores for window in windows])
        cells: Sequence[str] = (
            model,
            str(members),
            TITLES[name],
            spread(rates),
            spread(ratios),
            " + ".join([first, *rest]),
            others,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)

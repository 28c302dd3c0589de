"""What a person sees while a job runs: a live block on a terminal, else a line every few seconds. All of it
on stderr.

facts (Progress, events as sentences) -> Display.show / Display.event -> LiveDisplay | LineDisplay
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trireme.view.report import without_tokens
from trireme_shared.protocol.rest import JobView

LINE_EVERY_S = 5.0
LINE_AT_MOST_EVERY_S = 1.0
REFRESH_PER_SECOND = 4


@dataclass(frozen=True, slots=True)
class Progress:
    """The job at one moment. `step`: how many are done. `records_*`: over all epochs. None: not known yet."""

    phase: str
    stage: str
    epoch: int = 0
    epochs: int = 0
    step: int | None = None
    loss: float | None = None
    records_done: int = 0
    records_total: int = 0
    records_per_s: float | None = None
    eta_s: float | None = None
    trainers: int = 0
    trainers_desired: int = 0
    pservers: int = 0
    pservers_desired: int = 0
    restarts: int = 0
    reason: str = ""
    stalled: str = ""

    @property
    def fraction(self) -> float:
        return min(1.0, self.records_done / self.records_total) if self.records_total else 0.0

    def training(self) -> str:
        """`epoch 2/5  step 140  loss 0.312  5,120 records/s  ETA 0:12`, or at the end `stalled: waiting for
        pserver-0`."""
        stalled = f"  stalled: {without_tokens(self.stalled)}" if self.stalled else ""
        return self._training() + stalled

    def _training(self) -> str:
        if self.phase in {"WAITING", "ROLLING_BACK", "STARTING", "QUEUED", "PAUSED", "CANCELLED"}:
            return without_tokens(self.reason) or "waiting for members"
        if self.stage not in {"TRAIN", ""}:
            return (
                f"{self.stage.lower()}: {without_tokens(self.reason)}" if self.reason else self.stage.lower()
            )
        parts = [f"epoch {min(self.epoch + 1, self.epochs)}/{self.epochs}"]
        if self.step is not None:
            parts.append(f"step {self.step}")
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4g}")
        if self.records_per_s is not None:
            parts.append(f"{self.records_per_s:,.0f} records/s")
        if self.eta_s is not None:
            parts.append(f"ETA {clock_text(self.eta_s)}")
        return "  ".join(parts)

    def members(self) -> str:
        """`trainers 2/2  pservers 2/2  restarts 0`; a collective job has no pservers."""
        members = members_text(self.trainers, self.trainers_desired, self.pservers, self.pservers_desired)
        return f"{members}  restarts {self.restarts}"


def members_text(trainers: int, trainers_desired: int, pservers: int, pservers_desired: int) -> str:
    """`trainers 2/2  pservers 1/1`, or without pservers if there are none and shall be none."""
    servers = f"  pservers {pservers}/{pservers_desired}" if pservers or pservers_desired else ""
    return f"trainers {trainers}/{trainers_desired}{servers}"


def progress_of(job: JobView, restarts: int) -> Progress:
    facts = dict(job) | dict(job.members) | dict(job.progress) | {"restarts": restarts}
    return Progress(**{field.name: facts[field.name] for field in fields(Progress) if field.name in facts})


def say(text: str) -> None:
    """A message for the user, on stderr."""
    print(text, file=sys.stderr)  # noqa: T201


def clock_text(seconds: float) -> str:
    """`0:09`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Display(Protocol):
    """`close` removes the progress from the screen and leaves the events."""

    def show(self, progress: Progress, now: float) -> None: ...

    def event(self, sentence: str) -> None: ...

    def output(self, lines: Sequence[tuple[str, str]]) -> None:
        """What members' scripts printed: member and line."""

    def close(self) -> None: ...


class LineDisplay:
    """For logs and pipes: events at once, progress every `LINE_EVERY_S` seconds and soon after a change of
    epoch or phase; of many short epochs less and less often."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: tuple[float, tuple[str, str, int]] | None = None
        self._epoch_s = LINE_AT_MOST_EVERY_S  # until the line of another epoch may come

    def show(self, progress: Progress, now: float) -> None:
        place = (progress.phase, progress.stage, progress.epoch)
        if self._last is not None:
            since_s, before = now - self._last[0], self._last[1]
            is_epoch = before != place and before[:2] == place[:2]
            if since_s < (
                LINE_EVERY_S if before == place else self._epoch_s if is_epoch else LINE_AT_MOST_EVERY_S
            ):
                return
            self._epoch_s = min(LINE_EVERY_S, 2 * self._epoch_s) if is_epoch else LINE_AT_MOST_EVERY_S
        self._last = (now, place)
        self.event(f"{progress.phase}  {progress.training()}  {progress.members()}")

    def event(self, sentence: str) -> None:
        self._console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def output(self, lines: Sequence[tuple[str, str]]) -> None:
        _print_output(self._console, lines)

    def close(self) -> None:
        return


class LiveDisplay:
    """For terminals: a bar, the numbers, the members; events scroll above them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(
            Text("starting"), console=console, refresh_per_second=REFRESH_PER_SECOND, transient=True
        )
        self._live.start()

    def show(self, progress: Progress, now: float) -> None:  # noqa: ARG002  rich draws at its own rate
        grid = Table.grid(padding=(0, 2))
        grid.add_row(
            Text(progress.phase.lower(), style="bold"),
            ProgressBar(total=1.0, completed=progress.fraction, width=30),
            Text(f"{progress.fraction:.0%}"),
        )
        self._live.update(Group(grid, Text(progress.training()), Text(progress.members(), style="dim")))

    def event(self, sentence: str) -> None:
        self._console.print(sentence, markup=False, highlight=False, style="yellow", soft_wrap=True)

    def output(self, lines: Sequence[tuple[str, str]]) -> None:
        _print_output(self._console, lines)

    def close(self) -> None:
        self._live.stop()


def _print_output(console: Console, lines: Sequence[tuple[str, str]]) -> None:
    """Members' lines at once, so that the live block is drawn once for them."""
    bar = "│" if console.encoding.startswith("utf") else "|"
    text = Text("\n").join(Text.assemble((f"{member} {bar} ", "cyan"), line) for member, line in lines)
    console.print(text, highlight=False, soft_wrap=True)


def display() -> Display:
    """LiveDisplay if stderr is a terminal, else LineDisplay."""
    console = Console(stderr=True)
    return LiveDisplay(console) if sys.stderr.isatty() else LineDisplay(console)

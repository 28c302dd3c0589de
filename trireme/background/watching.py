"""How the user sees a run: lines on stderr; in a notebook a picture of it, with a chart of the loss, that is
replaced where it stands.

a notebook's kernel ─► InPlace
a script ─► Lines
a prompt ─► Lines, while the user waits for the run
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any, Protocol

from rich.console import Console

from trireme.background.errors import JobStopped
from trireme.background.supervised import Told, Watcher
from trireme.cli.queries import outcome
from trireme.view.chart import Points, last_chart, sparkline
from trireme.view.progress import LineDisplay
from trireme.view.report import number, summary_text
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.metrics import LOSS

REDRAW_S = 0.25
EVENTS = 4
LINES = 8
TREND = 40  # characters
WIDE, HIGH = 480, 110  # of the chart, in pixels


class Attended(Watcher, Protocol):
    def attended(self) -> Any:
        """A context manager: the user waits for the run."""
        ...


class Lines:
    """`always`: also while the user does something else; else it would write into what is typed."""

    def __init__(self, *, always: bool) -> None:
        self._display = LineDisplay(Console(stderr=True))
        self._always, self._waiting = always, 0

    @contextmanager
    def attended(self) -> Iterator[None]:
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def take(self, kind: str, value: Any, told: Told) -> None:
        if not (self._always or self._waiting):
            return
        match kind:
            case "progress":
                self._display.show(told.progress, clock.monotonic())
            case "event":
                self._display.event(value)
            case "output":
                self._display.output([(member, line) for member, line in value])
            case "ended" if value.result is not None:
                self._display.event(f"{value.phase}  {outcome(value.result)}".rstrip())
                if sys.stderr.isatty() and (drawn := last_chart(LOSS, told.losses, sys.stderr.encoding)):
                    self._display.event(drawn)


class InPlace:
    """Made in the cell under which it stands."""

    def __init__(self) -> None:
        from IPython.display import display  # noqa: PLC0415  it is there: a kernel asks for this

        self._handle: Any = display(Picture(Told()), display_id=True)  # type: ignore[no-untyped-call]
        self._drawn = clock.monotonic()

    @contextmanager
    def attended(self) -> Iterator[None]:
        yield

    def take(self, kind: str, value: Any, told: Told) -> None:
        del value
        now = clock.monotonic()
        if kind in ("begun", "ended") or now - self._drawn > REDRAW_S:
            self._drawn = now
            self._handle.update(Picture(told))


def watcher() -> Attended:
    """For where we are."""
    if in_notebook():
        return InPlace()
    return Lines(always=not hasattr(sys, "ps1"))


def in_notebook() -> bool:
    """Whether a kernel runs this, so that output may be replaced. IPython in a terminal has no kernel."""
    shell = sys.modules.get("IPython")
    running = shell.get_ipython() if shell is not None else None
    return running is not None and hasattr(running, "kernel")


class Picture:
    """A run at one moment, as text and as HTML."""

    def __init__(self, told: Told) -> None:
        self._job = told.begun["job"] if told.begun else ""
        self._progress, self._end = told.progress, told.end
        self._losses = list(told.losses)
        self._below = [
            *list(told.events)[-EVENTS:],
            *(f"{member} │ {line}" for member, line in list(told.lines)[-LINES:]),
        ]

    @property
    def phase(self) -> str:
        return self._end.phase if self._end else self._progress.phase

    def summary(self) -> str:
        """Of what is known: where training is, or how the job ended."""
        if self._end is None:
            return f"{self._progress.training()}\n{self._progress.members()}"
        if self._end.result is not None and self._end.error is None:
            return summary_text(self._end.result)
        error = self._end.error
        # the last event says how it goes on
        hint = "" if isinstance(error, JobStopped) else getattr(error, "hint", "")
        return f"{error}\n{hint}".rstrip()

    def __repr__(self) -> str:
        trend = sparkline([loss for _, loss in self._losses], TREND)
        return "\n".join(
            [
                f"{self._job} {self.phase}".strip(),
                self.summary(),
                *([f"loss {trend}"] if trend else []),
                *self._below,
            ]
        )

    def _repr_html_(self) -> str:
        return self.html()

    def html(self) -> str:
        bar = (
            ""
            if self._end
            else f'<progress max="1" value="{self._progress.fraction:.3f}"></progress> '
            f"{self._progress.fraction:.0%}"
        )
        below = "\n".join(map(escape, self._below)) if self._end is None or self._end.error else ""
        return (
            f"<div><b>{escape(self._job)}</b> {escape(self.phase)} {bar}"
            f'<pre style="margin:0">{escape(self.summary())}</pre>{svg(self._losses)}'
            f'<pre style="margin:0;opacity:.7">{below}</pre></div>'
        )


def svg(points: Points) -> str:
    """A line through them, with the lowest and the highest value; "" for less than two."""
    if len(points) < 2:
        return ""
    least, most = min(value for _, value in points), max(value for _, value in points)
    first, steps = points[0][0], points[-1][0] - points[0][0] or 1
    high = most - least or 1
    line = " ".join(
        f"{(step - first) / steps * WIDE:.1f},{(most - value) / high * HIGH:.1f}" for step, value in points
    )
    label = (
        f"loss from {number(points[0][1])} at step {points[0][0]:.0f} to {number(points[-1][1])} at "
        f"step {points[-1][0]:.0f}"
    )
    text = 'font-size="11" fill="currentColor" font-family="monospace"'
    return (
        f'<svg role="img" aria-label="{label}" viewBox="-4 -16 {WIDE + 8} {HIGH + 34}" '
        f'width="{WIDE}" style="display:block">'
        f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
        f'<text x="0" y="-4" {text}>loss {number(most)}</text>'
        f'<text x="0" y="{HIGH + 14}" {text}>{number(least)}</text>'
        f'<text x="{WIDE}" y="{HIGH + 14}" text-anchor="end" {text}>step {points[-1][0]:.0f}</text></svg>'
    )

"""How a run looks in a notebook: text, and the same as HTML with a chart of the loss."""

from __future__ import annotations

from html import escape

from trireme.background.errors import JobStopped
from trireme.background.supervised import Told
from trireme.view.chart import Points, sparkline
from trireme.view.report import number, summary_text

EVENTS = 4
LINES = 8
TREND = 40  # characters
WIDE, HIGH = 480, 110  # of the chart, in pixels


class Picture:
    """Of one moment."""

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
        hint = "" if isinstance(error, JobStopped) else getattr(error, "hint", "")  # the last event says how it goes on
        return f"{error}\n{hint}".rstrip()

    def __repr__(self) -> str:
        trend = sparkline([loss for _, loss in self._losses], TREND)
        return "\n".join(
            [f"{self._job} {self.phase}".strip(), self.summary(), *([f"loss {trend}"] if trend else []), *self._below]
        )

    def _repr_html_(self) -> str:
        return self.html()

    def html(self) -> str:
        bar = (
            ""
            if self._end
            else f'<progress max="1" value="{self._progress.fraction:.3f}"></progress> {self._progress.fraction:.0%}'
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
    line = " ".join(f"{(step - first) / steps * WIDE:.1f},{(most - value) / high * HIGH:.1f}" for step, value in points)
    label = f"loss from {number(points[0][1])} at step {points[0][0]:.0f} to {number(points[-1][1])} at step {points[-1][0]:.0f}"
    text = 'font-size="11" fill="currentColor" font-family="monospace"'
    return (
        f'<svg role="img" aria-label="{label}" viewBox="-4 -16 {WIDE + 8} {HIGH + 34}" width="{WIDE}" style="display:block">'
        f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
        f'<text x="0" y="-4" {text}>loss {number(most)}</text>'
        f'<text x="0" y="{HIGH + 14}" {text}>{number(least)}</text>'
        f'<text x="{WIDE}" y="{HIGH + 14}" text-anchor="end" {text}>step {points[-1][0]:.0f}</text></svg>'
    )

"""How the user sees a run: lines on stderr; in a notebook, text that is replaced where it stands.

a notebook's kernel ─► InPlace        a script ─► Lines        a prompt ─► Lines, while the user waits for the run
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console

from trireme.background.picture import Picture
from trireme.background.supervised import Told, Watcher
from trireme.cli.history.runs import outcome
from trireme.view.chart import last_chart
from trireme.view.progress import LineDisplay
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.metrics import LOSS

REDRAW_S = 0.25


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

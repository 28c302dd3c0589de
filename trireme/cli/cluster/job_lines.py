"""Jobs of a cluster as lines on stderr, as `trireme up` shows them while they run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trireme.cli.queries import COUNTS
from trireme.view.progress import LINE_EVERY_S, REFRESH_PER_SECOND, Progress, members_text
from trireme.view.report import without_tokens

SHOWN = 20  # jobs on a terminal; those that have not ended come first
ENDED = ("COMPLETED", "FAILED", "CANCELLED")
STOPPING = {  # what its users asked for -> its state until that is done, and what it does
    "pause": ("pausing", "saves a checkpoint, then its members leave"),
    "cancel": ("cancelling", "its members leave"),
}

Job = Mapping[str, Any]


def columns_of(job: Job) -> tuple[str, str, str, str, str]:
    """Name, state, how much is done, what it does, its members. `job`: as listJobs gives it."""
    progress = job["progress"]
    begun = progress["records_total"] > 0  # else nobody knows how far it is
    known = {field.name: progress[field.name] for field in fields(Progress) if field.name in progress}
    members, reason = job["members"], without_tokens(job["reason"])
    at = Progress(phase=job["state"], stage="TRAIN", reason=reason, **known)
    doing = reason if job["state"] in ENDED or not begun else at.training()
    state = str(job["state"]).lower()
    if job["standing"] == "ACTIVE" and job["wanted"] in STOPPING and job["state"] not in ENDED:
        state, doing = STOPPING[job["wanted"]]
    held = members_text(*(members[name] for name in COUNTS))
    return (
        str(job["job"]),
        state,
        f"{at.fraction:.0%}" if begun else "",
        doing,
        held if job["standing"] == "ACTIVE" else "",
    )


class JobLines(Protocol):
    """`close` removes what is redrawn from the screen and leaves the events."""

    def show(self, jobs: Sequence[Job], now: float) -> None: ...

    def event(self, sentence: str) -> None: ...

    def close(self) -> None: ...


class PlainLines:
    """For logs and pipes: a line when the state of a job changes, and one every LINE_EVERY_S seconds for each
    that runs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._states: dict[str, str] = {}
        self._told = float("-inf")

    def show(self, jobs: Sequence[Job], now: float) -> None:
        due = now - self._told >= LINE_EVERY_S
        for job in jobs:
            columns = columns_of(job)
            changed = self._states.get(job["job"]) != columns[1]
            self._states[job["job"]] = columns[1]
            if changed or (due and job["standing"] == "ACTIVE" and job["progress"]["records_total"]):
                self.event("  ".join(part for part in columns if part))
        self._told = now if due else self._told

    def event(self, sentence: str) -> None:
        self._console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        return


class LiveLines:
    """For terminals."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(
            Text("starting"), console=console, refresh_per_second=REFRESH_PER_SECOND, transient=True
        )
        self._live.start()

    def show(self, jobs: Sequence[Job], now: float) -> None:  # noqa: ARG002  rich draws at its own rate
        if not jobs:
            self._live.update(Text("no job yet: trireme submit SCRIPT", style="dim"))
            return
        ordered = sorted(jobs, key=lambda job: job["state"] in ENDED)
        grid = Table.grid(padding=(0, 2))
        for job in ordered[:SHOWN]:
            name, state, fraction, doing, members = columns_of(job)
            grid.add_row(
                Text(name, style="bold"), Text(state), Text(fraction), Text(doing), Text(members, style="dim")
            )
        more = len(ordered) - SHOWN
        self._live.update(Group(grid, Text(f"and {more} more", style="dim")) if more > 0 else grid)

    def event(self, sentence: str) -> None:
        self._console.print(sentence, markup=False, highlight=False, style="yellow", soft_wrap=True)

    def close(self) -> None:
        self._live.stop()


def job_lines() -> JobLines:
    """LiveLines if stderr is a terminal, else PlainLines."""
    console = Console(stderr=True)
    return LiveLines(console) if sys.stderr.isatty() else PlainLines(console)

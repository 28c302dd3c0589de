"""The table of `trireme jobs`: a line for each job, as wide as the terminal.

jobs ─ row_of ─► cells by column ─ table ─► lines

A pipe and `--wide` get every column whole, an empty cell as `-`, so what one line has does not depend on the
others. A terminal gets what fits: first a long `doing` is cut, then the columns of members are left out, then
metrics and names are cut (NARROWER).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rich.cells import cell_len, set_cell_size

from trireme.cli.cluster.job_lines import columns_of
from trireme.view.report import number
from trireme_shared.protocol.times import instant

#: `time`: since the job started; of one that has ended, from start to end; of others since submission.
COLUMNS = ("job", "state", "done", "loss", "metric", "time", "trainers", "pservers", "doing")
NOTHING = "-"
GAP = "  "
#: What a terminal does that is too narrow, one after the other: the column keeps so many cells, or (0) is
#: left out.
NARROWER = (
    ("doing", 20),
    ("pservers", 0),
    ("trainers", 0),
    ("metric", 12),
    ("job", 14),
    ("doing", 12),
    ("metric", 0),
    ("loss", 0),
    ("time", 0),
)

Row = dict[str, str]


def table(rows: Sequence[Row], width: int | None = None, ellipsis: str = "…") -> list[str]:
    """The header and a line for each row. `width`: lines have at most so many cells, 45 at least; None: they
    are whole."""
    columns = list(COLUMNS)
    widths = {name: max(cell_len(text) for text in (name, *(row[name] for row in rows))) for name in COLUMNS}
    if width is not None:
        widths = _fitted(widths, width)
        columns = [name for name in COLUMNS if name in widths]

    def line(cells: Mapping[str, str]) -> str:
        shown = [_cut(cells[name], widths[name], ellipsis) for name in columns]
        return GAP.join(set_cell_size(text, widths[name]) for name, text in zip(columns, shown, strict=True))

    return [line(cells).rstrip() for cells in ({name: name for name in COLUMNS}, *rows)]


def row_of(job: Mapping[str, Any], now: float) -> Row:
    """`job`: as listJobs gives it. `now`: seconds since 1970."""
    without_loss = {**job, "progress": {**job["progress"], "loss": None}}  # it has a column of its own
    name, state, done, doing, members = columns_of(without_loss)
    loss = job["progress"]["loss"]
    counts = job["members"]
    cells = {
        "job": name,
        "state": state,
        "done": done,
        "loss": "" if loss is None else number(loss),
        "metric": metric_of(job),
        "time": time_of(job, now),
        "trainers": f"{counts['trainers']}/{counts['trainers_desired']}" if members else "",
        "pservers": f"{counts['pservers']}/{counts['pservers_desired']}" if members else "",
        "doing": doing,
    }
    return {column: _one_line(text) or NOTHING for column, text in cells.items()}


def metric_of(job: Mapping[str, Any]) -> str:
    """`accuracy=0.9722`: the first of its newest metrics; empty: none is known."""
    return next((f"{name}={number(value)}" for name, value in job["metrics"].items()), "")


def time_of(job: Mapping[str, Any], now: float) -> str:
    """How long the job runs, ran or waits; empty: it does not say since when. Clocks of two hosts may
    differ: it is never below 0."""
    started, ended = job["start_time"], job["end_time"]
    since = started if started and (ended or job["standing"] == "ACTIVE") else job["create_time"]
    with suppress(ValueError):  # another version's text
        return duration(max(0.0, (instant(ended) if ended else now) - instant(since)))
    return ""


def duration(seconds: float) -> str:
    """`42s`, `12m`, `3h12m`, `2d4h`."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days}d{hours % 24}h"
    if hours:
        return f"{hours}h{minutes % 60}m"
    return f"{minutes}m" if minutes else f"{int(seconds)}s"


def _fitted(widths: Mapping[str, int], width: int) -> dict[str, int]:
    """The columns that are shown, with their widths."""
    fitted = dict(widths)

    def excess() -> int:
        return sum(fitted.values()) + len(GAP) * (len(fitted) - 1) - width

    for name, least in NARROWER:
        if excess() <= 0:
            break
        if least:
            fitted[name] = max(min(fitted[name], least), fitted[name] - excess())
        else:
            del fitted[name]
    fitted["doing"] = min(widths["doing"], max(fitted["doing"], fitted["doing"] - excess()))
    return fitted


def _cut(text: str, cells: int, ellipsis: str) -> str:
    if cell_len(text) <= cells:
        return text
    return set_cell_size(text, max(0, cells - cell_len(ellipsis))).rstrip() + ellipsis


def _one_line(text: str) -> str:
    """A user's exception may have line ends, and sequences that a terminal obeys."""
    return "".join(each if each.isprintable() else " " for each in text).strip()

"""`trireme metrics`: the metrics of a job by step, of its master, or from its storage if nobody leads it (any more).

table: the last values       csv, json: all points       plot: a chart of each       follow: again and again until the job's end
"""

from __future__ import annotations

import asyncio
import csv
import json
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from rich.live import Live
from rich.text import Text

from master_service.storage.series_files import StoredSeries, read_all
from trireme.cli import exit_codes
from trireme.cli.checkpoint import spec_of
from trireme.cli.history.logs import forget_output
from trireme.cli.options import Form
from trireme.cli.targets import job_target
from trireme.client import AsyncClient
from trireme.client.waiting import has_ended
from trireme.view.chart import SMALL_ROWS, chart, last_chart, shows_braille, sparkline
from trireme.view.job_address import open_job
from trireme.view.report import number
from trireme.view.series import MetricSource, OfMaster, OfStorage, Row
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.errors import Conflict, InvalidArgument, NotFound, PeerError, TriremeError
from trireme_shared.protocol.metrics import EVALUATION, LOSS, is_own
from trireme_shared.protocol.records import JobSpec

LOOK_S = 1.0
LOST_S = 60.0  # how long nobody may answer for metrics that are followed
SAMPLES = 200  # of a metric, for its row in the table
TREND = 32  # characters
COLUMNS = ("epoch", "step", "last_step", "mean", "least", "most", "weight")


@dataclass(frozen=True, slots=True)
class Found:
    """`over`: the job trains no more, so nothing will come."""

    job: str
    source: MetricSource
    over: bool
    by: str = "step"

    async def points(self, name: str, first: int = 0, most: int | None = None) -> list[Row]:
        """The points of a metric of the source's list from step `first` on, `most` of them at most; None: all that are kept."""
        # the job may have gone back to before its first step since; what is no sum over a step's records, and asynchronous jobs, have no
        # epochs
        with suppress(NotFound):
            if self.by == "step":
                return await self.source.points(name, first, most)
            return await self.source.epochs(name, first)
        return []

    def place(self, row: Row) -> int:
        """The step of a point, or its epoch, counted from 1 as progress counts them."""
        return int(row["step"] if self.by == "step" else row["epoch"] + 1)


Write = Callable[[str, Iterable[Row]], None]
Open = Callable[[], AbstractAsyncContextManager[Found]]


def metrics(
    job: str | None,
    data_dir: Path | None,
    url: str | None,
    wanted: Sequence[str],
    form: Form,
    *,
    by: str = "step",
    follow: bool = False,
) -> int:
    """The exit code. `wanted`: names, or patterns with * and ?; empty: all."""
    telemetry.configure(level="ERROR", json=False)
    found = partial(find_metrics, job, data_dir, url, by)
    try:
        if not follow:
            asyncio.run(_show(found, wanted, form))
        elif form in ("csv", "json"):
            asyncio.run(follow_points(found, wanted, _line_writer(form)))
        else:
            asyncio.run(_redraw(found, wanted, form))
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=form == "json")
    except BrokenPipeError:
        forget_output()
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    return exit_codes.OK


@asynccontextmanager
async def find_metrics(job: str | None, data_dir: Path | None, url: str | None, by: str) -> AsyncIterator[Found]:
    """Open the metrics of the job that is meant. Raises TriremeError."""
    try:
        target = job_target(job, data_dir, url)
    except (Conflict, PeerError):  # a run that has ended, or was stopped
        yield await stored(spec_of(job, data_dir, url), by)
        return
    async with open_job(target.address, token=target.token) as (client, name):
        if not isinstance(client, AsyncClient):
            raise Conflict("jobs without a master keep no metrics by step", hint="`trireme status` tells the loss")
        view = await client.get_job(name)
        yield Found(view.job, OfMaster(client, name), has_ended(view), by)


async def stored(spec: JobSpec, by: str) -> Found:
    try:
        return Found(spec.job, OfStorage(await read_all(StoredSeries(spec.storage))), over=True, by=by)
    except OSError as error:
        raise PeerError(f"the job's storage cannot be read: {error}") from error


async def loss_chart(storage: str) -> str:
    """The chart of the loss of a job that has ended, for a terminal; "" if there is nothing to draw, or its storage does not answer."""
    try:
        source = OfStorage(await read_all(StoredSeries(storage)))
        rows = await source.points(LOSS, most=2 * shutil.get_terminal_size().columns)
    except (OSError, TriremeError):
        return ""
    return last_chart(LOSS, [(row["step"], row["mean"]) for row in rows], sys.stdout.encoding)


async def _show(opened: Open, wanted: Sequence[str], form: Form) -> None:
    if form in ("table", "plot"):
        print(await drawn(opened, wanted, form))  # noqa: T201
    elif form == "csv":
        await show_points(opened, wanted, _line_writer(form))
    else:
        async with opened() as found:
            points = [(each["name"], await found.points(each["name"])) for each in await _wanted(found, wanted)]
            told = [{"name": name, "points": rows} for name, rows in points if rows]
            print(json.dumps({"job": found.job, "by": found.by, "metrics": told}))  # noqa: T201


async def show_points(opened: Open, wanted: Sequence[str], write: Write) -> None:
    """All that are kept now."""
    async with opened() as found:
        for summary in await _wanted(found, wanted):
            write(summary["name"], await found.points(summary["name"]))


async def follow_points(opened: Open, wanted: Sequence[str], write: Write) -> None:
    """Each point once, when there is a later one or the job has ended; also through changes of the master and rollbacks: steps that are
    trained again are not told again. Raises PeerError after LOST_S without an answer."""
    heard, begins = clock.monotonic(), dict[str, int]()
    while True:
        try:
            async with opened() as found:
                for name in [summary["name"] for summary in await _wanted(found, wanted, none_yet=True)]:
                    rows = await found.points(name, begins.get(name, 0))
                    taken = rows if found.over else rows[:-1]
                    write(name, taken)
                    if taken:
                        begins[name] = taken[-1]["last_step"] + 1
                if found.over:
                    return
            heard = clock.monotonic()
        except PeerError:
            if clock.monotonic() - heard > LOST_S:
                raise
        await asyncio.sleep(LOOK_S)


async def _redraw(opened: Open, wanted: Sequence[str], form: Form) -> None:
    if not sys.stdout.isatty():
        raise InvalidArgument("a table or chart is followed on a terminal only", hint="add --csv or --json")
    heard = clock.monotonic()
    with ExitStack() as stack:
        live = stack.enter_context(Live(auto_refresh=False, vertical_overflow="crop", redirect_stdout=False))
        while True:
            try:
                async with opened() as found:
                    live.update(Text(await _text(found, wanted, form), no_wrap=True), refresh=True)
                    if found.over:
                        return
                heard = clock.monotonic()
            except PeerError:
                if clock.monotonic() - heard > LOST_S:
                    raise
            await asyncio.sleep(LOOK_S)


async def _wanted(found: Found, wanted: Sequence[str], *, none_yet: bool = False) -> list[Row]:
    """Raises NotFound for a name that nothing has, unless it may still come."""
    there = await found.source.summaries()
    for pattern in wanted:
        if not any(fnmatchcase(each["name"], pattern) for each in there) and not (none_yet and not found.over):
            names = ", ".join(each["name"] for each in there) or "none yet"
            raise NotFound(f"job {found.job} has no metric {pattern}; it has: {names}")
    return [each for each in there if not wanted or any(fnmatchcase(each["name"], pattern) for pattern in wanted)]


async def drawn(opened: Open, wanted: Sequence[str], form: Form) -> str:
    """A table or charts of what is known now."""
    async with opened() as found:
        return await _text(found, wanted, form)


async def _text(found: Found, wanted: Sequence[str], form: Form) -> str:
    summaries = await _wanted(found, wanted)
    text = await (_charts if form == "plot" else _table)(found, summaries, bool(wanted)) if summaries else ""
    return text or f"job {found.job} has no such metrics by {found.by}{'' if found.over else ' yet'}"


async def _table(found: Found, summaries: Sequence[Row], _: bool) -> str:
    rows, braille = [("metric", found.by, "last", "lowest", "highest", "trend")], shows_braille(sys.stdout.encoding)
    for summary in sorted(summaries, key=lambda each: (each["name"] != LOSS, is_own(each["name"]), each["name"])):
        points = await found.points(summary["name"], most=SAMPLES)
        if not points:
            continue  # to be trained again
        last = points[-1]
        if found.by == "step" and last["step"] != last["last_step"]:
            more = await found.points(summary["name"], last["step"])
            last = more[-1] if more else last  # the job has gone back meanwhile
        rows.append(
            (
                *(
                    summary["name"],
                    str(last["last_step"] if found.by == "step" else found.place(last)),
                    number(last["mean"]),
                ),
                *(number(min(point["least"] for point in points)), number(max(point["most"] for point in points))),
                sparkline([point["mean"] for point in points], TREND, braille=braille),
            )
        )
    if len(rows) == 1:
        return ""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers, trend in rows:
        shown = [f"{text:>{width}}" for text, width in zip(numbers, widths[1:-1], strict=True)]
        lines.append("  ".join([f"{name:<{widths[0]}}", *shown, trend]))
    return "\n".join(lines)


async def _charts(found: Found, summaries: Sequence[Row], named: bool) -> str:
    """Without names, what says how well the model does."""
    names = [each["name"] for each in summaries]
    if not named:
        names = [name for name in names if name.startswith((LOSS, EVALUATION)) or not is_own(name)] or names
    size, braille = shutil.get_terminal_size(), shows_braille(sys.stdout.encoding)
    several = {"rows": SMALL_ROWS} if len(names) > 1 else {}
    drawn = []
    for name in sorted(names, key=lambda each: (each != LOSS, each)):
        points = [(found.place(row), row["mean"]) for row in await found.points(name, most=2 * size.columns)]
        if points:
            drawn.append("\n".join(chart(name, points, size.columns, braille=braille, unit=found.by, **several)))
    return "\n\n".join(drawn)


def _line_writer(form: Form) -> Write:
    """What writes points as CSV with a header, or as JSON objects."""
    if form == "json":

        def write_json(name: str, rows: Iterable[Row]) -> None:
            for row in rows:
                print(json.dumps({"name": name, **row}), flush=True)  # noqa: T201

        return write_json
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(("metric", *COLUMNS))

    def write_csv(name: str, rows: Iterable[Row]) -> None:
        out.writerows((name, *(row.get(column) for column in COLUMNS)) for row in rows)
        sys.stdout.flush()

    return write_csv

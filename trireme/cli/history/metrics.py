"""`trireme metrics` and `trireme tensorboard`: the metrics of a job by step, of its master, or from its
storage if nobody leads it (any more). Both sources give the same documents (`SeriesSummary`, `SeriesPoint`).

table: the last values
csv, json: all points
plot: a chart of each
follow: again and again until the job's end
TensorBoard: each point once, in an event file in a folder for each job; TensorBoard on this machine reads the
folder of all
"""

from __future__ import annotations

import asyncio
import csv
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rich.live import Live
from rich.text import Text

from master_service.core.state.series import Value
from master_service.storage.series_files import StoredMetrics, StoredSeries, read_all
from master_service.trackers.event_files import EventFiles
from trireme.cli import exit_codes
from trireme.cli.checkpoint import spec_of
from trireme.cli.options import Form
from trireme.cli.targets import job_target
from trireme.client import AsyncClient
from trireme.client.exchange import has_ended
from trireme.view.chart import SMALL_ROWS, chart, last_chart, shows_braille, sparkline
from trireme.view.job_address import open_job
from trireme.view.report import number
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.errors import Conflict, InvalidArgument, NotFound, PeerError, TriremeError
from trireme_shared.protocol.metrics import EVALUATION, LOSS, is_own
from trireme_shared.protocol.records import JobSpec

ALL = 5000  # points that a master gives at once
LAST_STEP = 2**62
LOOK_S = 1.0
LOST_S = 60.0  # how long nobody may answer for metrics that are followed
SAMPLES = 200  # of a metric, for its row in the table
TREND = 32  # characters
COLUMNS = ("epoch", "step", "last_step", "mean", "least", "most", "weight")
ENDING_S = 5.0  # of TensorBoard
HOST = "127.0.0.1"

Row = dict[str, Any]
Write = Callable[[str, Iterable[Row]], None]


class MetricSource(Protocol):
    """All raise TriremeError; NotFound if there is no such metric."""

    async def summaries(self) -> list[Row]:
        """What metrics there are, in the order of their names."""
        ...

    async def points(self, name: str, first: int = 0, most: int | None = None) -> list[Row]:
        """The points of a metric from step `first` on, `most` of them at most; None: all that are kept."""
        ...

    async def epochs(self, name: str, first: int = 0) -> list[Row]:
        """A point for each epoch that begins at step `first` or later."""
        ...


class OfMaster:
    """The metrics of a job that a master leads."""

    def __init__(self, client: AsyncClient, job: str) -> None:
        self._client, self._job = client, job

    async def summaries(self) -> list[Row]:
        return [summary.model_dump() async for summary in self._client.list_metric_series(self._job)]

    async def points(self, name: str, first: int = 0, most: int | None = None) -> list[Row]:
        if most is not None:
            return await self._query(name, first, LAST_STEP, min(ALL, most))
        found = {summary["name"]: summary for summary in await self.summaries()}
        if name not in found:
            raise NotFound(f"metric {name} does not exist; there are: {', '.join(found) or 'none yet'}")
        width, last = found[name]["width"], found[name]["last_step"]
        begin = max(first, found[name]["first_step"])
        begin -= begin % width
        rows: list[Row] = []
        for start in range(begin, last + 1, ALL * width):
            rows += await self._query(name, start, start + ALL * width - 1, ALL)
        return [row for row in rows if row["step"] >= first]

    async def epochs(self, name: str, first: int = 0) -> list[Row]:
        return await self._query(name, first, LAST_STEP, ALL, "epoch")

    async def _query(self, name: str, first: int, last: int, most: int, by: str = "step") -> list[Row]:
        found = await self._client.query_metric(
            self._job, name, from_step=first, to_step=last, points=most, by=by
        )
        return [point.model_dump() for point in found.points]


class OfStorage:
    """The metrics of a job that nobody leads, from its storage."""

    def __init__(self, stored: StoredMetrics) -> None:
        self._table, self._steps = stored.table, stored.steps

    async def summaries(self) -> list[Row]:
        rows = []
        for name, series in sorted(self._table.by_name.items()):
            points = series.points(0, LAST_STEP, LAST_STEP, 0, None)
            known = {"first_step": points[0].first, "last_step": points[-1].last}
            rows.append({"name": name, **known, "points": len(points), "width": series.width})
        return rows

    async def points(self, name: str, first: int = 0, most: int | None = None) -> list[Row]:
        found = self._table.by_name.get(name)
        if found is None:
            there = ", ".join(sorted(self._table.by_name)) or "none"
            raise NotFound(f"metric {name} does not exist; there are: {there}")
        points = found.points(first, LAST_STEP, most or LAST_STEP, 0, None)
        return [_row(point.first, point.last, None, point.value) for point in points if point.first >= first]

    async def epochs(self, name: str, first: int = 0) -> list[Row]:
        epochs = sorted(self._steps.epochs.items())
        ends = [epoch.first - 1 for _, epoch in epochs[1:]] + [self._steps.next - 1] * bool(epochs)
        return [
            _row(epoch.first, max(epoch.first, end), number, value)
            for (number, epoch), end in zip(epochs, ends, strict=True)
            if epoch.first >= first and (value := epoch.sums.get(name)) is not None
        ]


def _row(first: int, last: int, epoch: int | None, value: Value) -> Row:
    known = {"step": first, "last_step": last, "epoch": epoch, "mean": value.total / value.weight}
    return {**known, "least": value.least, "most": value.most, "weight": value.weight}


@dataclass(frozen=True, slots=True)
class Found:
    """`over`: the job trains no more, so nothing will come."""

    job: str
    source: MetricSource
    over: bool
    by: str = "step"

    async def points(self, name: str, first: int = 0, most: int | None = None) -> list[Row]:
        """The points of a metric of the source's list from step `first` on, `most` of them at most; None: all
        that are kept."""
        # the job may have gone back to before its first step since; what is no sum over a step's records, and
        # asynchronous jobs, have no epochs
        with suppress(NotFound):
            if self.by == "step":
                return await self.source.points(name, first, most)
            return await self.source.epochs(name, first)
        return []

    def place(self, row: Row) -> int:
        """The step of a point, or its epoch, counted from 1 as progress counts them."""
        return int(row["step"] if self.by == "step" else row["epoch"] + 1)


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
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    return exit_codes.OK


@asynccontextmanager
async def find_metrics(
    job: str | None, data_dir: Path | None, url: str | None, by: str
) -> AsyncIterator[Found]:
    """Open the metrics of the job that is meant. Raises TriremeError."""
    try:
        target = job_target(job, data_dir, url)
    except (Conflict, PeerError):  # a run that has ended, or was stopped
        yield await stored(spec_of(job, data_dir, url), by)
        return
    async with open_job(target.address, token=target.token) as (client, name):
        if not isinstance(client, AsyncClient):
            raise Conflict(
                "jobs without a master keep no metrics by step", hint="`trireme status` tells the loss"
            )
        view = await client.get_job(name)
        yield Found(view.job, OfMaster(client, name), has_ended(view), by)


async def stored(spec: JobSpec, by: str) -> Found:
    try:
        return Found(spec.job, OfStorage(await read_all(StoredSeries(spec.storage))), over=True, by=by)
    except OSError as error:
        raise PeerError(f"the job's storage cannot be read: {error}") from error


async def loss_chart(storage: str) -> str:
    """The chart of the loss of a job that has ended, for a terminal; "" if there is nothing to draw, or its
    storage does not answer."""
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
            points = [
                (each["name"], await found.points(each["name"])) for each in await _wanted(found, wanted)
            ]
            told = [{"name": name, "points": rows} for name, rows in points if rows]
            print(json.dumps({"job": found.job, "by": found.by, "metrics": told}))  # noqa: T201


async def show_points(opened: Open, wanted: Sequence[str], write: Write) -> None:
    """All that are kept now."""
    async with opened() as found:
        for summary in await _wanted(found, wanted):
            write(summary["name"], await found.points(summary["name"]))


async def follow_points(opened: Open, wanted: Sequence[str], write: Write) -> None:
    """Each point once, when there is a later one or the job has ended; also through changes of the master and
    rollbacks: steps that are trained again are not told again. Raises PeerError after LOST_S without an
    answer."""
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
        if not any(fnmatchcase(each["name"], pattern) for each in there) and not (
            none_yet and not found.over
        ):
            names = ", ".join(each["name"] for each in there) or "none yet"
            raise NotFound(f"job {found.job} has no metric {pattern}; it has: {names}")
    return [
        each for each in there if not wanted or any(fnmatchcase(each["name"], pattern) for pattern in wanted)
    ]


async def drawn(opened: Open, wanted: Sequence[str], form: Form) -> str:
    """A table or charts of what is known now."""
    async with opened() as found:
        return await _text(found, wanted, form)


async def _text(found: Found, wanted: Sequence[str], form: Form) -> str:
    summaries = await _wanted(found, wanted)
    text = await (_charts if form == "plot" else _table)(found, summaries, bool(wanted)) if summaries else ""
    return text or f"job {found.job} has no such metrics by {found.by}{'' if found.over else ' yet'}"


async def _table(found: Found, summaries: Sequence[Row], _: bool) -> str:
    rows, braille = (
        [("metric", found.by, "last", "lowest", "highest", "trend")],
        shows_braille(sys.stdout.encoding),
    )
    for summary in sorted(
        summaries, key=lambda each: (each["name"] != LOSS, is_own(each["name"]), each["name"])
    ):
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
                *(
                    number(min(point["least"] for point in points)),
                    number(max(point["most"] for point in points)),
                ),
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
            drawn.append(
                "\n".join(chart(name, points, size.columns, braille=braille, unit=found.by, **several))
            )
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


def tensorboard(
    jobs: Sequence[str], data_dir: Path | None, url: str | None, *, port: int, out: Path | None
) -> int:
    """The exit code. `out`: only write the event files of what is known now, into a folder for each job
    there."""
    telemetry.configure(level="ERROR", json=False)
    try:
        if importlib.util.find_spec("tensorboard") is None:
            raise InvalidArgument(
                "TensorBoard is not installed here", hint="pip install 'trireme[tensorboard]'"
            )
        sources = [
            partial(find_metrics, job, data_dir, url, "step") for job in dict.fromkeys(jobs) or (None,)
        ]
        if out is not None:
            asyncio.run(_export(sources, out))
            return exit_codes.OK
        with tempfile.TemporaryDirectory(prefix="trireme-tensorboard-") as folder:
            return asyncio.run(_serve(sources, Path(folder), port))
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=False)
    except OSError as error:
        return exit_codes.report_error(
            InvalidArgument(f"event files cannot be written: {error}"), as_json=False
        )
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED


async def _export(sources: Iterable[Open], out: Path) -> None:
    for source in sources:
        name = await _name(source)
        with EventFiles(out / name) as files:
            await show_points(source, (), files.write)
        print(out / name)  # noqa: T201


async def _serve(sources: Iterable[Open], folder: Path, port: int) -> int:
    """Until TensorBoard ends. Raises TriremeError if a job is not there; what happens to it later is only
    told."""
    with ExitStack() as stack:
        files = [
            (source, stack.enter_context(EventFiles(folder / await _name(source)))) for source in sources
        ]
        following = [asyncio.ensure_future(_follow(source, each)) for source, each in files]
        arguments = ("--logdir", str(folder), "--host", HOST, "--port", str(port), "--reload_interval", "2")
        server = await asyncio.create_subprocess_exec(sys.executable, "-m", "tensorboard.main", *arguments)
        try:
            return exit_codes.OK if await server.wait() == 0 else exit_codes.JOB_FAILED
        finally:
            for each in following:
                each.cancel()
            await asyncio.wait(following)
            if server.returncode is None:
                server.terminate()
                try:
                    await asyncio.wait_for(server.wait(), ENDING_S)
                except TimeoutError:
                    server.kill()
                    await server.wait()


async def _name(source: Open) -> str:
    async with source() as found:
        return found.job


async def _follow(source: Open, files: EventFiles) -> None:
    try:
        await follow_points(source, (), files.write)
    except (TriremeError, OSError) as error:
        print(f"{files}: nothing more is added: {error}", file=sys.stderr)  # noqa: T201

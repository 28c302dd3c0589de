"""The metrics of a job on its storage: `<storage>/metrics/`, files that are written once.

00000012-00000003.json      what was reported since the file before; the term of the master, and a count
00000012-00000004-all.json  all until then: the files before it are deleted
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from master_service.core.state.series import Epoch, LeftSteps, SeriesTable, Value, WholeSteps
from trireme_shared.platform.runtime import telemetry
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import DeadlineExceeded, StorageUnreachable, TooManyRequests

FOLDER = "metrics"
ATTEMPTS = 5
_ALL = "-all"

log = telemetry.logger("series")
AT_ONCE = 2  # a storage that hangs takes no more threads, which the leader needs
MOST_WAITING = 64  # jobs
READ_S = 8.0
MOST_BUCKETS = 1_000_000  # 48 MB


class SeriesFiles(Protocol):
    """The port to the files of a job's metrics. All raise OSError."""

    async def names(self) -> list[str]: ...

    async def read(self, name: str) -> bytes: ...

    async def write(self, name: str, content: bytes) -> None: ...

    async def remove(self, names: Iterable[str]) -> None: ...


@dataclass(frozen=True, slots=True)
class StoredMetrics:
    """All that `names`, files of a job, hold."""

    names: tuple[str, ...] = ()
    table: SeriesTable = field(default_factory=SeriesTable)
    steps: WholeSteps = field(default_factory=WholeSteps)


Aside = Callable[[Callable[[], None]], Awaitable[None]]  # runs what takes the processor for long


class StoredSeries:
    """Below the job's storage. Files block, so they are read and written in threads."""

    def __init__(self, storage: str) -> None:
        self._folder = files.join(storage, FOLDER)

    async def names(self) -> list[str]:
        return await asyncio.to_thread(files.names, self._folder)

    async def read(self, name: str) -> bytes:
        return await asyncio.to_thread(files.read_bytes, files.join(self._folder, name))

    async def write(self, name: str, content: bytes) -> None:
        await asyncio.to_thread(files.write_bytes, files.join(self._folder, name), content)

    async def remove(self, names: Iterable[str]) -> None:
        for name in names:
            await asyncio.to_thread(files.remove_file, files.join(self._folder, name))


def name_of(term: int, number: int, *, everything: bool) -> str:
    """In the order in which they are written, also by masters that follow each other."""
    return f"{term:020d}-{number:08d}{_ALL if everything else ''}.json"


def to_read(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """(those that hold all metrics, in their order; those that are not needed any more)."""
    ordered = sorted(name for name in names if name.endswith(".json"))
    last = max((place for place, name in enumerate(ordered) if name.endswith(f"{_ALL}.json")), default=0)
    return ordered[last:], ordered[:last]


async def read_all(
    stored: SeriesFiles, before: StoredMetrics | None = None, aside: Aside = asyncio.to_thread
) -> StoredMetrics:
    """All that is stored; for a job that a master may still lead, what it has written. `before`: what was
    read last, which is given back if there are no other files since. One file at a time is in memory. Raises
    OSError."""
    for _ in range(ATTEMPTS):
        found = StoredMetrics(tuple(to_read(await stored.names())[0]))
        if before is not None and before.names == found.names:
            return before
        with contextlib.suppress(FileNotFoundError):  # a master has put them together meanwhile
            for name in found.names:
                content = await stored.read(name)
                await aside(partial(add_encoded, found.table, found.steps, content, name))
            return found
    raise OSError("the files of metrics changed whenever they were read; try again")


def encoded(
    table: SeriesTable,
    steps: WholeSteps | None = None,
    first: int = 0,
    epochs: Collection[int] = (),
    *,
    everything: bool = False,
) -> bytes:
    """`steps`: which of the whole steps, from `first` on, the file holds. `epochs`: which are told.
    `everything`: also the steps that the job left."""
    document: dict[str, Any] = {"version": 1, "series": _series(table)}
    if steps is not None:
        told = {
            str(number): [epoch.first, epoch.sums]
            for number, epoch in steps.epochs.items()
            if number in epochs
        }
        document["steps"] = {"first": first, "next": steps.next, "timeline": steps.timeline, "epochs": told}
        if everything:
            left = steps.left
            tables = {timeline: _series(kept) for timeline, kept in left.tables.items()}
            document["left"] = {
                "begins": left.begins,
                "ends": left.ends,
                "epochs": left.epochs,
                "tables": tables,
            }
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def _series(table: SeriesTable) -> dict[str, Any]:
    return {
        name: {
            "width": found.width,
            "buckets": [[step, timeline, *value] for step, timeline, value in found],
            **({"ordered": True, "covered": found.covered} if found.ordered else {}),
        }
        for name, found in table.by_name.items()
    }


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """As `dict`, but in Python: there a thread gives others their turn, once for each series, and not after
    some megabytes only."""
    return dict(pairs)


def add_encoded(table: SeriesTable, steps: WholeSteps, content: bytes, name: str) -> None:
    """In place. A file that cannot be read is left out, with a line in the log: metrics are information."""
    try:
        document = json.loads(content, object_pairs_hook=_members)
        held, known = document.get("steps"), False
        if held is not None and int(held["next"]) <= steps.next and int(held["timeline"]) <= steps.timeline:
            # it is of a master that had not read what one before it, which was frozen, wrote late
            known = True
        elif held is not None and int(held["first"]) < steps.next:
            steps.rewind(int(held["first"]), table)  # an earlier master wrote them, too, or the job went back
        _add_series(table, document["series"], whole=not known)
        if held is not None and not known:
            steps.next, steps.timeline = int(held["next"]), int(held["timeline"])
            for number, (first, sums) in held["epochs"].items():
                values = {str(metric): Value(*map(float, value)) for metric, value in sums.items()}
                steps.epochs[int(number)] = Epoch(int(first), values)
            if (left := document.get("left")) is not None:
                steps.left = _left(left)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("metrics_unreadable", file=name, cause=repr(error))


def _add_series(table: SeriesTable, held: Mapping[str, Any], *, whole: bool) -> None:
    """In place. `whole`: series of whole steps, too."""
    for metric, found in held.items():
        part, width, ordered = SeriesTable(), int(found["width"]), bool(found.get("ordered"))
        if ordered and not whole:
            continue
        for step, timeline, *value in found["buckets"]:
            if all(map(math.isfinite, value)):
                part.add(str(metric), int(step), int(timeline), Value(*map(float, value)), ordered=ordered)
        if (series := part.by_name.get(str(metric))) is not None:
            series.widen(width)
            series.covered = int(found.get("covered", 0))
        table.merge(part)


def _left(held: Mapping[str, Any]) -> LeftSteps:
    left = LeftSteps(
        begins={int(timeline): (step, before) for timeline, (step, before) in held["begins"].items()},
        ends={int(timeline): int(end) for timeline, end in held["ends"].items()},
        epochs={int(number): int(first) for number, first in held["epochs"].items()},
    )
    for timeline, series in held["tables"].items():
        kept = left.tables[int(timeline)] = SeriesTable()
        _add_series(kept, series, whole=True)
    return left


class SeriesReader:
    """`aside` runs what takes the processor for long: the event loop leads jobs meanwhile."""

    def __init__(self, aside: Aside = asyncio.to_thread) -> None:
        self._aside = aside
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._reading: dict[str, asyncio.Future[StoredMetrics]] = {}
        self._kept: dict[str, StoredMetrics] = {}  # the one that was asked for last is the last

    def __repr__(self) -> str:
        return f"<SeriesReader: {len(self._reading)} jobs being read, {len(self._kept)} kept>"

    async def read(self, job: str, stored: SeriesFiles | None) -> StoredMetrics:
        """`stored` None: the job keeps no metrics. Who asks for the same job meanwhile waits for the same
        read. Raises StorageUnreachable, TooManyRequests; DeadlineExceeded: it goes on, ask again."""
        if stored is None:
            return StoredMetrics()
        reading = self._reading.get(job)
        if reading is None:
            if len(self._reading) >= MOST_WAITING:
                raise TooManyRequests(
                    f"the metrics of {MOST_WAITING} jobs are being read here, at most so many may be"
                )
            reading = self._reading[job] = asyncio.ensure_future(self._read(job, stored))
            reading.add_done_callback(partial(self._ended, job))
        try:
            async with asyncio.timeout(READ_S):
                return await asyncio.shield(reading)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the metrics of job {job} were not read within {READ_S:g} s; ask again"
            ) from error
        except OSError as error:
            raise StorageUnreachable(
                f"the stored metrics of job {job} cannot be read: {error}; ask again"
            ) from error

    def _ended(self, job: str, reading: asyncio.Future[StoredMetrics]) -> None:
        del self._reading[job]
        if not reading.cancelled():
            reading.exception()  # its callers may have left

    async def _read(self, job: str, stored: SeriesFiles) -> StoredMetrics:
        async with self._turns:
            found = await read_all(stored, self._kept.pop(job, None), self._aside)
        self._kept[job] = found
        while len(self._kept) > 1 and sum(map(_buckets, self._kept.values())) > MOST_BUCKETS:
            del self._kept[next(iter(self._kept))]
        return found


def _buckets(found: StoredMetrics) -> int:
    return sum(map(len, found.table.by_name.values()))

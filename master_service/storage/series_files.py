"""The metrics of a job on its storage: `<storage>/metrics/`, files that are written once.

00000012-00000003.json      what was reported since the file before; the term of the master, and a count
00000012-00000004-all.json  all until then: the files before it are deleted
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable
from typing import Protocol

from master_service.core.state.series import SeriesTable, Value
from shared.runtime import telemetry
from shared.storage import files

FOLDER = "metrics"
_ALL = "-all"

log = telemetry.logger("series")


class SeriesFiles(Protocol):
    """The port to the files of a job's metrics. All raise OSError."""

    async def names(self) -> list[str]: ...

    async def read(self, name: str) -> bytes: ...

    async def write(self, name: str, content: bytes) -> None: ...

    async def remove(self, names: Iterable[str]) -> None: ...


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


def encoded(table: SeriesTable) -> bytes:
    series = {
        name: {"width": found.width, "buckets": [[step, timeline, *value] for step, timeline, value in found]}
        for name, found in table.by_name.items()
    }
    return json.dumps({"version": 1, "series": series}, separators=(",", ":"), allow_nan=False).encode()


def add_encoded(table: SeriesTable, content: bytes, name: str) -> None:
    """In place. A file that cannot be read is left out, with a line in the log: metrics are information."""
    try:
        for metric, found in json.loads(content)["series"].items():
            part, width = SeriesTable(), int(found["width"])
            for step, timeline, *value in found["buckets"]:
                if all(map(math.isfinite, value)):
                    part.add(str(metric), int(step), int(timeline), Value(*map(float, value)))
            if (series := part.by_name.get(str(metric))) is not None:
                series.widen(width)
            table.merge(part)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("metrics_unreadable", file=name, cause=repr(error))

"""The tracker `csv`: `<storage>/metrics/metrics.csv`, one row for each metric and point, as `trireme metrics
--csv` gives them.

pandas.read_csv(file).pivot(index="step", columns="metric", values="mean")

The file is always whole: it is written anew beside and renamed, which a folder and an object store can do.
The longer that takes, the rarer it is done.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from master_service.storage.series_files import FOLDER
from master_service.trackers.tracker import Point, Run
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.storage import files

FILE = "metrics.csv"
COLUMNS = ("metric", "step", "last_step", "mean", "least", "most", "weight")
SHARE = 0.05  # of the time may be spent writing


class CsvFile:
    def __init__(self) -> None:
        self._place, self._content, self._unwritten = "", io.StringIO(), False
        self._next = 0.0

    def begin(self, run: Run) -> Mapping[str, int]:
        self._place = files.join(run.storage, FOLDER, FILE)
        try:
            before = files.read_bytes(self._place).decode()
        except FileNotFoundError:
            before = ",".join(COLUMNS) + "\n"
        self._content = io.StringIO(before)
        self._content.seek(0, io.SEEK_END)
        told: dict[str, int] = {}
        for row in csv.DictReader(io.StringIO(before)):
            told[row["metric"]] = max(told.get(row["metric"], 0), int(row["last_step"]) + 1)
        return told

    def log(self, points: Sequence[Point]) -> None:
        rows = csv.writer(self._content, lineterminator="\n")
        rows.writerows((point.name, point.step, point.last_step, *point[3:]) for point in points)
        self._unwritten = True
        if clock.monotonic() >= self._next:
            self._write()

    def end(self, result: Mapping[str, Any]) -> None:
        del result
        self.close()

    def close(self) -> None:
        if self._unwritten:
            self._write()

    def _write(self) -> None:
        begin = clock.monotonic()
        files.write_bytes(self._place, self._content.getvalue().encode())
        self._unwritten, now = False, clock.monotonic()
        self._next = now + (now - begin) / SHARE

"""The metrics of a job by step, of its master or from its storage: the same documents from both (`SeriesSummary`, `SeriesPoint`)."""

from __future__ import annotations

from typing import Any, Protocol

from master_service.core.state.series import Value
from master_service.storage.series_files import StoredMetrics
from trireme.client import AsyncClient
from trireme_shared.protocol.errors import NotFound

ALL = 5000  # points that a master gives at once
LAST_STEP = 2**62

Row = dict[str, Any]


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
        found = await self._client.query_metric(self._job, name, from_step=first, to_step=last, points=most, by=by)
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

"""Metrics and evaluations as answers of the REST API. Reads only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from master_service.api.pages import offset_of, page_of
from master_service.core.state.metrics import Metrics
from master_service.core.state.series import Epoch, Series, SeriesTable
from trireme_shared.protocol.errors import NotFound
from trireme_shared.protocol.evaluations import Evaluation
from trireme_shared.protocol.rest import (
    EvaluationPage,
    MetricPage,
    MetricPoint,
    SeriesPage,
    SeriesPoint,
    SeriesPoints,
    SeriesSummary,
)


@dataclass(frozen=True, slots=True)
class KeptMetrics:
    """`known`: whole steps before this one are in `epochs`. `timeline`: what earlier ones say of steps from `done` on does not count."""

    table: SeriesTable
    epochs: Mapping[int, Epoch]
    known: int
    timeline: int = 0
    done: int | None = None


def metrics(kept: Metrics, metric: str, page_size: int, page_token: str) -> MetricPage:
    """`metric`: "step_loss" or "epoch_loss"; the token is the last number seen. Raises NotFound."""
    series = {"step_loss": kept.steps, "epoch_loss": kept.epochs}.get(metric)
    if series is None:
        raise NotFound(f"metric {metric} does not exist; there are step_loss and epoch_loss")
    after = offset_of(page_token) if page_token else -1
    numbers = sorted(number for number in series if number > after)
    page, more = page_of(numbers, 0, page_size)
    points = tuple(
        MetricPoint(number=n, loss=series[n].loss, records=series[n].records, skipped=series[n].skipped) for n in page
    )
    return MetricPage(metric=metric, points=points, next_page_token=str(page[-1]) if more else "")


def evaluations(found: Sequence[Evaluation], page_size: int, page_token: str) -> EvaluationPage:
    """`found`: in the order of their numbers, of which the token is the last one seen."""
    before = offset_of(page_token) if page_token else None
    newest = [each for each in reversed(found) if before is None or each.number < before]
    page, more = page_of(newest, 0, page_size)
    return EvaluationPage(evaluations=tuple(page), next_page_token=str(page[-1].number) if more else "")


def series_page(table: SeriesTable, page_size: int, page_token: str) -> SeriesPage:
    """In the order of their names."""
    page, token = page_of(sorted(table.by_name), offset_of(page_token), page_size)
    return SeriesPage(series=tuple(_summary(name, table.by_name[name]) for name in page), next_page_token=token)


def series_points(kept: KeptMetrics, name: str, first: int, last: int, most: int) -> SeriesPoints:
    """At most `most` points of the steps in [first, last]. Raises NotFound."""
    found = kept.table.by_name.get(name)
    if found is None:
        there = ", ".join(sorted(kept.table.by_name)) or "none yet"
        raise NotFound(f"metric {name} does not exist; there are: {there}")
    points = found.points(first, last, most, kept.timeline, kept.done)
    return SeriesPoints(
        name=name,
        points=tuple(
            SeriesPoint(
                step=point.first,
                last_step=point.last,
                mean=point.mean,
                least=point.value.least,
                most=point.value.most,
                weight=point.value.weight,
            )
            for point in points
        ),
    )


def epoch_points(kept: KeptMetrics, name: str, first: int, last: int, most: int) -> SeriesPoints:
    """The last `most` epochs that begin with a step in [first, last]. Raises NotFound."""
    epochs = kept.epochs
    ends = {number: epoch.first - 1 for number, epoch in epochs.items()}
    found = [
        SeriesPoint(
            step=epoch.first,
            last_step=ends.get(number + 1, max(epoch.first, kept.known - 1)),
            epoch=number,
            mean=value.total / value.weight,
            least=value.least,
            most=value.most,
            weight=value.weight,
        )
        for number, epoch in sorted(epochs.items())
        if first <= epoch.first <= last and (value := epoch.sums.get(name)) is not None
    ]
    if not found and not any(name in epoch.sums for epoch in epochs.values()):
        there = ", ".join(sorted({each for epoch in epochs.values() for each in epoch.sums})) or "none yet"
        raise NotFound(f"metric {name} is not kept by epoch; there are: {there}")
    return SeriesPoints(name=name, points=tuple(found[-most:]))


def _summary(name: str, series: Series) -> SeriesSummary:
    steps = [bucket.step for bucket in series]
    last = steps[-1] + series.width - 1
    return SeriesSummary(name=name, first_step=steps[0], last_step=last, points=len(steps), width=series.width)

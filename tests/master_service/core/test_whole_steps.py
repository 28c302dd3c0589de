"""Steps of a synchronous job: each once, by step and by epoch, also where the job goes back and where buckets are wide."""

from __future__ import annotations

import pytest

from master_service.core.state import series as series_module
from master_service.core.state.series import SeriesTable, Value
from master_service.core.state.whole_steps import WholeSteps, values_of
from master_service.storage.series_files import add_encoded, encoded
from shared.records import StepMetrics
from tests.equipment.replaced import replaced

PER_EPOCH = 10


def share(step: int) -> StepMetrics:
    return StepMetrics(step=step, epoch=step // PER_EPOCH, loss_sum=float(step), records=1, lr=(0.5, 0.25))


def take(steps: WholeSteps, table: SeriesTable, first: int, last: int, timeline: int = 0) -> None:
    for each in steps.portion([share(step) for step in range(first, last)], None):
        values = list(values_of(each, skips=False))
        steps.count(each, values)
        for name, value in values:
            table.add(name, each.step, timeline, value, ordered=True)


def found(table: SeriesTable, name: str = "loss") -> list[tuple[int, Value]]:
    return [(bucket.step, bucket.value) for bucket in table.by_name[name]]


def whole(last: int) -> tuple[WholeSteps, SeriesTable]:
    steps, table = WholeSteps(), SeriesTable()
    take(steps, table, 0, last)
    return steps, table


def test_going_back_drops_later_steps_and_epochs_and_they_come_again() -> None:
    steps, table = whole(35)
    expected, same = whole(40)
    steps.rewind(14, table)
    assert (steps.next, max(table.by_name["loss"]).step, sorted(steps.epochs)) == (14, 13, [0, 1])
    assert steps.epochs[1].sums["loss"] == Value(10.0 + 11 + 12 + 13, 4, 10.0, 13.0)
    take(steps, table, 12, 40, timeline=7)
    assert (found(table), found(table, "lr.1")) == (found(same), found(same, "lr.1"))
    assert {number: epoch.sums for number, epoch in steps.epochs.items()} == {
        number: epoch.sums for number, epoch in expected.epochs.items()
    }
    steps.rewind(0, table)
    assert (steps.next, table.by_name, steps.epochs) == (0, {}, {})


def test_wide_buckets_count_each_step_once_after_going_back_into_the_middle_of_one() -> None:
    with replaced(series_module, "MOST_BUCKETS", 16):
        steps, table = whole(50)
        assert table.by_name["loss"].width == 4
        _, same = whole(61)
        for back, last in ((41, 44), (42, 61)):
            steps.rewind(back, table)
            take(steps, table, back, last, timeline=back)
        assert found(table) == found(same)


@pytest.mark.parametrize(
    "written",
    [
        # the first one lost its lock and wrote all the same; the second had read what was there before
        pytest.param(((0, 20), (20, 33), (20, 40), (28, 45)), id="the same steps"),
        # the first wrote 20 steps when the second had read what there was before; the third had read both but not what the second wrote at its end
        pytest.param(((0, 20), (0, 5), (0, 0), (20, 45)), id="late, by a frozen master"),
    ],
)
def test_files_of_several_masters_add_up_to_each_step_once(written: tuple[tuple[int, int], ...]) -> None:
    contents = []
    for first, last in written:
        steps, table = WholeSteps(next=first), SeriesTable()
        before, _ = whole(last)
        take(steps, table, first, last)
        contents.append(encoded(table, before, first, before.epochs.keys()))
    read, all_of_it = WholeSteps(), SeriesTable()
    for content in contents:
        add_encoded(all_of_it, read, content, "f")
    expected, same = whole(45)
    assert (found(all_of_it), read.next) == (found(same), 45)
    assert read.epochs == expected.epochs

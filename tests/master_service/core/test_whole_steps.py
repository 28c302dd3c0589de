"""Steps of a synchronous job: each once, by step and by epoch, also where the job goes back and where buckets
are wide."""

from __future__ import annotations

import pytest

from master_service.core.state import series as series_module
from master_service.core.state.series import SeriesTable, Value, WholeSteps, values_of
from master_service.storage.series_files import add_encoded, encoded
from tests.equipment.replaced import replaced
from trireme_shared.protocol.records import StepMetrics
from trireme_shared.protocol.records.checkpoints import CheckpointRef

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


def kept(*refs: tuple[str, int, int, str]) -> list[CheckpointRef]:
    return [
        CheckpointRef(uuid=name, step=step, timeline=line, manifest="m", origin=of)
        for name, step, line, of in refs
    ]


def values(table: SeriesTable) -> list[tuple[int, int]]:
    """(step, timeline) of each bucket of the loss."""
    return [(bucket.step, bucket.timeline) for bucket in table.by_name.get("loss", ())]


def lines(*parts: tuple[int, int, int]) -> list[tuple[int, int]]:
    return [(step, line) for line, first, end in parts for step in range(first, end)]


def stored(steps: WholeSteps, table: SeriesTable) -> tuple[WholeSteps, SeriesTable]:
    """As the next master reads them."""
    read, found = WholeSteps(), SeriesTable()
    content = encoded(table, steps, 0, steps.epochs.keys(), everything=True)
    add_encoded(found, read, content, "f")
    assert (values(found), read.next, read.timeline, read.epochs) == (
        values(table),
        steps.next,
        steps.timeline,
        steps.epochs,
    )
    left, same = read.left, steps.left
    assert (left.begins, left.ends, left.epochs) == (same.begins, same.ends, same.epochs)
    assert {line: values(each) for line, each in left.tables.items()} == {
        line: values(each) for line, each in same.tables.items()
    }
    return read, found


def test_steps_that_a_restore_left_come_back_with_a_later_checkpoint_each_of_its_own_timeline() -> None:
    steps, table = whole(50)
    refs = kept(("u19", 19, 0, ""), ("u44", 44, 0, ""))
    assert steps.follow(1, 19, 0, refs, table) == 19
    take(steps, table, 19, 33, timeline=1)
    steps, table = stored(steps, table)
    refs += kept(("u30", 30, 1, "u19"))
    assert steps.follow(2, 44, 0, refs, table) == 19, "those of timeline 1 lead to other parameters"
    assert (steps.next, values(table)) == (44, lines((0, 0, 44)))
    take(steps, table, 44, 60, timeline=2)
    expected, same = whole(60)
    assert (found(table), found(table, "lr.1")) == (found(same), found(same, "lr.1"))
    assert {number: (epoch.first, epoch.sums) for number, epoch in steps.epochs.items()} == {
        number: (epoch.first, epoch.sums) for number, epoch in expected.epochs.items()
    }
    steps, table = stored(steps, table)
    steps.follow(3, 30, 1, refs, table)
    assert (steps.next, values(table)) == (30, lines((0, 0, 19), (1, 19, 30)))
    take(steps, table, 30, 35, timeline=3)
    steps.follow(4, 44, 0, refs, table)
    assert (steps.next, values(table)) == (44, lines((0, 0, 44)))
    steps.follow(5, 19, 0, refs[:1], table)
    assert not steps.left.tables, "no checkpoint is kept behind them"
    assert steps.left.begins == {5: (19, 0)}


def test_steps_that_nobody_kept_are_asked_for_and_those_of_an_unknown_timeline_count_as_the_same() -> None:
    steps, table = whole(40)
    steps.follow(1, 10, 0, [], table)
    steps.follow(2, 30, 0, [], table)
    assert (steps.next, values(table)) == (10, lines((0, 0, 10)))
    steps, table = whole(40)
    refs = kept(("u30", 30, 7, "gone"))
    steps.follow(8, 10, None, refs, table)
    take(steps, table, 10, 15, timeline=8)
    steps.follow(9, 30, 7, refs, table)
    assert (steps.next, values(table)) == (30, lines((0, 0, 10), (8, 10, 15), (0, 15, 30)))


def test_wide_buckets_come_back_with_each_step_once() -> None:
    with replaced(series_module, "MOST_BUCKETS", 16):
        steps, table = whole(50)
        _, same = whole(70)
        refs = kept(("u41", 41, 0, ""), ("u46", 46, 0, ""))
        for timeline, origin, end in ((1, 41, 43), (2, 46, 49), (3, 41, 42), (4, 46, 70)):
            steps.follow(timeline, origin, 0, refs, table)
            assert steps.next == origin
            take(steps, table, origin, end, timeline=timeline)
        assert found(table) == found(same)


def test_wide_buckets_come_back_behind_narrow_ones() -> None:
    """The job began anew, and buckets with it."""
    with replaced(series_module, "MOST_BUCKETS", 16):
        steps, table = whole(50)
        _, same = whole(70)
        refs = kept(("u0", 0, 0, ""), ("u46", 46, 0, ""))
        for timeline, origin, end in ((1, 0, 3), (2, 46, 70)):
            steps.follow(timeline, origin, 0, refs, table)
            take(steps, table, origin, end, timeline=timeline)
        assert table.by_name["loss"].width == same.by_name["loss"].width
        assert found(table) == found(same)


def test_a_timeline_without_a_report_is_known_by_its_checkpoint() -> None:
    """Its steps are missing, those of the timeline before it do not stand for them."""
    steps, table = whole(30)
    refs = kept(("u10", 10, 0, ""), ("u15", 15, 1, "u10"))
    assert steps.follow(2, 15, 1, refs, table) == 10
    assert (steps.next, values(table)) == (10, lines((0, 0, 10)))


@pytest.mark.parametrize(
    "written",
    [
        # the first one lost its lock and wrote all the same; the second had read what was there before
        pytest.param(((0, 20), (20, 33), (20, 40), (28, 45)), id="the same steps"),
        # the first wrote 20 steps when the second had read what there was before; the third had read both but
        # not what the second wrote at its end
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

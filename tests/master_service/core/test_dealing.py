"""Which task stands where, so that lanes end together: the shares of lanes, each task once, and back."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from master_service.core.queue.file_table import FileTable, TableFile
from master_service.core.queue.streams import Classes, Dealing, Streams, longest_share
from trireme_shared.protocol.records import TaskKind


def streams_of(
    files: tuple[int, ...], task_records: int, lanes: int, minibatch: int, **more: bool
) -> Streams:
    table = FileTable(tuple(TableFile(f"f{n}", count) for n, count in enumerate(files)), task_records)
    return Streams(TaskKind.TRAIN, table, lanes, 7, more.pop("shuffle", True), minibatch, **more)


def shares(streams: Streams, epoch: int) -> list[int]:
    """Minibatches of each lane, one task after the other."""
    return [
        sum(
            -(-streams.records_of(streams.at(epoch, lane, index)) // streams.minibatch)
            for index in range(streams.length(lane))
        )
        for lane in range(streams.count)
    ]


def drawn(seed: int) -> Streams:
    rng = random.Random(seed)
    files = tuple(
        rng.choice((0, 1, rng.randrange(400), rng.randrange(4000))) for _ in range(rng.randrange(1, 30))
    )
    minibatch = rng.choice((1, 2, 8, 32))
    records = rng.choice((minibatch * rng.randrange(2, 17), rng.randrange(16, 600)))
    return streams_of((*files, 1), records, rng.choice((2, 4, 8, 64)), minibatch)


@pytest.mark.parametrize("seed", range(20))
def test_each_task_stands_once_in_an_epoch_and_its_place_leads_back(seed):
    streams = drawn(seed)
    for epoch in (0, 5):
        order = streams.order(epoch)
        tasks = [order.task_at(position) for position in range(streams.total)]
        assert sorted(tasks) == list(range(streams.total))
        assert [order.position_of(task) for task in tasks] == list(range(streams.total))
        assert all(
            streams.place(epoch, streams.at(epoch, lane, 0)) == (lane, 0)
            for lane in range(min(streams.total, 2))
        )


@pytest.mark.parametrize("seed", range(20))
def test_lanes_differ_by_less_than_one_task_and_the_longest_is_known_before(seed):
    streams = drawn(seed)
    full = -(-streams.table.task_records // streams.minibatch)
    for epoch in (0, 1, 9):
        found = shares(streams, epoch)
        assert max(found) == found[0] == streams.longest
        assert max(found) - min(found) <= full


def test_an_order_is_a_function_of_seed_and_epoch_and_short_tasks_do_not_stay_where_they_are():
    streams = streams_of((100, 30, 50, 70) * 8, 64, 4, 8)
    orders = [[streams.at(epoch, 0, index) for index in range(streams.length(0))] for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    rows = [
        {streams.place(epoch, str(task))[1] for epoch in range(12)} for task, _ in streams.table.short_tasks
    ]
    assert min(map(len, rows)) > 3  # the ends of files are not always the last to be trained


def test_tasks_that_are_all_alike_and_those_of_one_stream_keep_the_order_of_earlier_versions():
    old = streams_of((640, 640), 64, 4, 8, balanced=False)
    assert [old.order(3).task_at(n) for n in range(20)] == [
        streams_of((640, 640), 64, 4, 8).order(3).task_at(n) for n in range(20)
    ]
    uneven = (100, 30, 50, 70)
    assert [streams_of(uneven, 64, 1, 8).order(3).task_at(n) for n in range(6)] == [
        streams_of(uneven, 64, 4, 8, balanced=False).order(3).task_at(n) for n in range(6)
    ]


def test_an_unshuffled_epoch_keeps_the_order_of_the_files_and_its_steps_are_known():
    for files in ((100, 30, 50, 70), (30, 30, 20, 30)):
        streams = streams_of(files, 64, 4, 8, shuffle=False)
        assert [streams.order(2).task_at(n) for n in range(streams.total)] == list(range(streams.total))
        assert streams.longest == max(shares(streams, 0)) == max(shares(streams, 3))


def test_the_steps_of_a_job_that_an_earlier_version_began_are_unknown_where_they_differ_by_epoch():
    assert streams_of((100, 30, 50, 70), 64, 4, 8, balanced=False).longest is None
    assert streams_of((128, 64), 64, 4, 8, balanced=False).longest == 8


def test_the_classes_of_tasks_take_memory_by_files_not_by_tasks():
    classes = Classes(10**9, 16, [(5, 3), (10**9 - 1, 2)])
    order = Dealing(classes, 64, 1, 2)
    assert classes.counts == Counter({16: 10**9 - 2, 3: 1, 2: 1})
    for task in (0, 5, 6, 123_456_789, 10**9 - 1):
        assert order.task_at(order.position_of(task)) == task
    assert longest_share(classes.counts, 64) == 16 * (10**9 // 64)
    for outside in (-1, 10**9):
        with pytest.raises(IndexError, match="outside"):
            order.task_at(outside)
        with pytest.raises(IndexError, match="outside"):
            order.position_of(outside)

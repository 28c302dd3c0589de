"""The order of tasks that can be read only one after the other."""

from __future__ import annotations

import random

import pytest

from master_service.core.queue.file_table import FileTable, TableFile
from master_service.core.queue.streams import Streams
from trireme_shared.protocol.records import TaskKind


def table_of(counts, task_records=4):
    return FileTable(
        tuple(TableFile(str(n), count) for n, count in enumerate(counts)), task_records, in_sequence=True
    )


def streams_of(table, lanes, *, shuffle=True):
    return Streams(TaskKind.TRAIN, table, lanes, 3, shuffle, 2)


def runs_of(streams, epoch):
    order = streams.order(epoch)
    return [
        [order.task_at(lane + n * streams.count) for n in range(streams.length(lane))]
        for lane in range(streams.count)
    ]


def test_each_lane_has_one_run_and_an_epoch_shuffles_the_shards_in_it():
    streams = streams_of(table_of([20, 12, 8]), 2)
    found = {tuple(map(tuple, runs_of(streams, epoch))) for epoch in range(8)}
    assert found == {((0, 1, 2, 3, 4), (5, 6, 7, 8, 9)), ((0, 1, 2, 3, 4), (8, 9, 5, 6, 7))}
    assert runs_of(streams_of(table_of([20, 12, 8]), 2, shuffle=False), 0) == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
    ]


def test_it_is_a_bijection_and_lanes_end_together_for_any_shards():
    numbers = random.Random(0)
    for _ in range(60):
        table = table_of([numbers.choice((0, 1, 5, 16, 40)) for _ in range(numbers.randint(1, 6))] + [3])
        for lanes in (1, 3, 8):
            streams = streams_of(table, lanes)
            order = streams.order(1)
            tasks = [order.task_at(position) for position in range(table.tasks)]
            assert sorted(tasks) == list(range(table.tasks))
            assert [order.position_of(task) for task in tasks] == list(range(table.tasks))
            shares = [sum(-(-table.locate(task).count // 2) for task in run) for run in runs_of(streams, 1)]
            assert streams.longest == max(shares)
            assert streams.sum(1, 0, table.tasks, lambda records: records) == table.records
    with pytest.raises(IndexError, match=r"task 9 is outside \[0, 2\)"):
        streams_of(table_of([8]), 2).order(0).position_of(9)


def test_the_table_keeps_that_it_is_read_in_sequence_and_an_older_one_keeps_its_order():
    table = table_of([20, 12])
    assert FileTable.from_map(table.to_map()) == table
    older = {name: value for name, value in table.to_map().items() if name != "in_sequence"}
    assert not FileTable.from_map(older).in_sequence

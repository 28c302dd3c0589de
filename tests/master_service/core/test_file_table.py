"""The file table: tasks as arithmetic, whatever the size of the dataset."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from master_service.core.queue.file_table import FileTable, ShardLocation, TableFile

FILES = st.lists(st.integers(0, 40), min_size=1, max_size=8)


def table_of(counts: list[int], task_records: int) -> FileTable:
    return FileTable(tuple(TableFile(f"f{n}", count) for n, count in enumerate(counts)), task_records)


@given(FILES, st.integers(1, 12))
def test_tasks_cover_every_record_once_in_order_and_never_span_files(counts, task_records):
    table = table_of(counts, task_records)
    covered = [
        (place.file, record)
        for place in map(table.locate, range(table.tasks))
        for record in range(place.first, place.first + place.count)
    ]
    assert covered == [(f"f{n}", record) for n, count in enumerate(counts) for record in range(count)]
    assert table.records == sum(counts)


@given(FILES, st.integers(1, 12))
def test_only_a_files_last_task_is_short(counts, task_records):
    table = table_of(counts, task_records)
    places = [table.locate(task) for task in range(table.tasks)]
    short = [place for place in places if place.count < task_records]
    assert all(place.first + place.count == table.files[int(place.file[1:])].records for place in short)


def test_a_task_starts_at_its_files_offset():
    table = FileTable((TableFile("a", 5, (3, 70)), TableFile("b", 1, (0,))), 4)
    assert [table.locate(task) for task in range(3)] == [
        ShardLocation("a", 0, 4, 3),
        ShardLocation("a", 4, 1, 70),
        ShardLocation("b", 0, 1, 0),
    ]


@pytest.mark.parametrize("task", [-1, 3, 10**9])
def test_a_task_outside_the_table_is_refused(task):
    with pytest.raises(IndexError, match=rf"task {task} is outside \[0, 3\)"):
        table_of([5, 1], 4).locate(task)


def test_a_thousand_million_records_cost_one_entry_per_file():
    table = FileTable(tuple(TableFile(f"f{n}", 10**9) for n in range(3)), 1000)
    assert table.tasks == 3_000_000
    assert table.locate(2_999_999) == ShardLocation("f2", 10**9 - 1000, 1000)
    assert sum(sys.getsizeof(value) for value in (table, table.files, table.task_ends)) < 1000


@given(FILES, st.integers(1, 12))
def test_it_travels_as_json(counts, task_records):
    table = table_of(counts, task_records)
    assert FileTable.from_map(json.loads(json.dumps(table.to_map()))) == table


@pytest.mark.parametrize(
    "value", [{}, {"format": 2}, {"format": 1, "task_records": 1, "files": [{"path": "a"}]}]
)
def test_a_map_that_is_no_table_is_refused(value):
    with pytest.raises(ValueError):
        FileTable.from_map(value)


def test_offsets_that_do_not_fit_the_tasks_are_refused():
    with pytest.raises(ValueError, match="a: 5 records make 2 tasks, but there are 1 offsets"):
        FileTable((TableFile("a", 5, (0,)),), 4)


def test_its_repr_tells_the_state():
    assert repr(FileTable((TableFile("a", 5),), 4, "0123456789abcdef")) == (
        "<FileTable 0123456789ab: 1 files, 5 records, 2 tasks>"
    )

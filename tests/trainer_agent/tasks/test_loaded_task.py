"""A task in memory: its order is computed once however many lanes read by turns, and its records are there
once."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from tests.trainer_agent.scripts import spec_for, write_script
from trainer_agent.data import default_collate, minibatch_indices, shard
from trainer_agent.data.shard import RecordShard
from trainer_agent.tasks import source as task_source
from trainer_agent.tasks.source import TaskSource
from trireme_shared.protocol.records import Task

LANES, RECORDS = 64, 32


async def at_once(work, *arguments):
    return work(*arguments)


class Marked(dict[str, object]):
    """A record that can be counted while it lives."""

    __hash__ = object.__hash__


class Reader:
    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Marked] = weakref.WeakSet()

    def read(self, file, first, count, offset=None, stamp=""):
        records = [Marked({"x": float(n), "y": n}) for n in range(first, first + count)]
        self.alive |= set(records)
        return RecordShard(records)


def source_of(tmp_path, monkeypatch, *, by_columns=False) -> tuple[TaskSource, Reader]:
    reader = Reader()
    monkeypatch.setattr(task_source, "open_dataset", lambda *_, **__: reader)
    spec = spec_for(write_script(tmp_path), lanes=LANES, global_batch_size=4 * LANES)
    return TaskSource(spec, None, "me", at_once, by_columns=by_columns), reader


def task(number: int) -> Task:
    return Task(task_id=str(number), kind="TRAIN", attempt=1, first=number * RECORDS, count=RECORDS)


async def test_each_of_many_lanes_has_its_order_computed_once(tmp_path, monkeypatch):
    computed = []

    def counted(*arguments):
        computed.append(arguments)
        return shard.record_order(*arguments)

    monkeypatch.setattr(task_source, "record_order", counted)
    source, _ = source_of(tmp_path, monkeypatch)
    loaded = [await source.load(task(lane)) for lane in range(LANES)]
    for number in range(RECORDS // 4):
        for lane, each in enumerate(loaded):
            chosen = minibatch_indices(source.spec.seed, 0, lane, RECORDS, 4, number, shuffle=True)
            assert [record["y"] for record in source.minibatch(each, number)] == [
                lane * RECORDS + i for i in chosen
            ]
    assert len(computed) == LANES


@pytest.mark.parametrize("by_columns", [True, False])
async def test_records_are_in_memory_once(tmp_path, monkeypatch, by_columns):
    source, reader = source_of(tmp_path, monkeypatch, by_columns=by_columns)
    loaded = await source.load(task(0))
    gc.collect()
    assert len(reader.alive) == (0 if by_columns else RECORDS)
    assert repr(loaded.shard) == f"<RecordShard of 32 records: {'x, y' if by_columns else ''}>"
    if by_columns:
        batch = default_collate(source.minibatch(loaded, 0))
        assert batch["x"].tolist() == batch["y"].tolist() == list(loaded.order[:4])
        with pytest.raises(AssertionError, match="keeps columns is asked for records"):
            list(source.minibatch(loaded, 0))
    else:
        assert [record["y"] for record in source.minibatch(loaded, 1)] == list(loaded.order[4:8])


async def test_what_is_not_shuffled_has_no_order(tmp_path, monkeypatch):
    source, _ = source_of(tmp_path, monkeypatch)
    held_out = await source.load(
        Task(task_id="evaluate-3", kind="EVALUATE", attempt=1, first=0, count=RECORDS)
    )
    assert held_out.order is None
    assert [record["y"] for record in source.minibatch(held_out, 7)] == [28, 29, 30, 31]
    with pytest.raises(IndexError, match=r"minibatch 8 is outside \[0, 8\)"):
        source.minibatch(held_out, 8)
    assert np.array_equal(np.sort((await source.load(task(0))).order), np.arange(RECORDS))

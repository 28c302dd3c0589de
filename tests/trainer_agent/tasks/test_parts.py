"""Items that are read by number come minibatch by minibatch, and the first ones are computed meanwhile."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.trainer_agent.scripts import spec_for, write_script
from trainer_agent.tasks.lane_reader import LaneReader
from trainer_agent.tasks.source import TaskFailed, TaskSource
from trireme_shared.protocol.records import Task, TaskAnswer
from trireme_shared.protocol.records.datasets import MapStyle
from trireme_shared.protocol.records.step import LanePosition

RECORDS, SIZE = 12, 4


class Items:
    """`upto`: those from that number on cannot be read."""

    upto = 10**9

    def __len__(self):
        return 2 * RECORDS

    def __getitem__(self, number):
        if number >= Items.upto:
            raise ValueError("no such picture")
        return {"n": number}


def items():
    return Items()


class Master:
    """It has two tasks, and names the second one with the first."""

    async def acquire_task(self, ask):
        named = [
            Task(
                task_id=str(index),
                kind="TRAIN",
                attempt=1,
                file="items",
                first=RECORDS * index,
                count=RECORDS,
                index=index,
                stream_length=2,
            )
            for index in range(2)
        ]
        following = named[1].with_fields(attempt=0) if ask.index == 0 else None
        return TaskAnswer(answer="task", task=named[ask.index], following=following)


class InAThread:
    """A minibatch is read each time that it is allowed to be; until the end of the block."""

    def __init__(self, monkeypatch) -> None:
        self.allowed = threading.Semaphore(0)
        read = Items.__getitem__

        def once_allowed(items, number):
            if number % SIZE == 0:
                self.allowed.acquire(timeout=20)
            return read(items, number)

        monkeypatch.setattr(Items, "__getitem__", once_allowed)

    async def __call__(self, work, *arguments):
        return await asyncio.to_thread(work, *arguments)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.allowed.release(2 * RECORDS)


def lane_of(tmp_path, reads) -> LaneReader:
    dataset = MapStyle(f"{__name__}:items", records=2 * RECORDS)
    spec = spec_for(
        write_script(tmp_path),
        dataset=dataset,
        global_batch_size=SIZE,
        records_per_task=RECORDS,
        shuffle=False,
    )
    return LaneReader(0, TaskSource(spec, Master(), "me", reads), lambda: 1)


def numbers(portion):
    return [record["n"] for record in portion.records]


async def test_a_minibatch_is_computed_while_those_after_it_are_read_and_the_next_task_after_them(
    tmp_path, monkeypatch
):
    position, found = LanePosition(lane=0), []
    with InAThread(monkeypatch) as reads:
        lane = lane_of(tmp_path, reads)
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            for _ in range(2 * RECORDS // SIZE):
                waiting = asyncio.ensure_future(lane.at(position))
                await asyncio.sleep(0.01)
                assert lane.at_hand(position) is None
                assert not waiting.done(), "its own records are not read"
                reads.allowed.release()
                portion = await waiting
                found += numbers(portion)
                assert lane.next(portion.after) is None
                lane.read_ahead(group)
                position = portion.after
            lane.drop()
    assert found == list(range(2 * RECORDS))


async def test_a_record_that_cannot_be_read_fails_when_it_is_due_and_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(Items, "upto", SIZE + 1)

    async def at_once(work, *arguments):
        return work(*arguments)

    lane = lane_of(tmp_path, at_once)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        first = await lane.at(LanePosition(lane=0))
        lane.read_ahead(group)
        await asyncio.sleep(0.01)
        assert numbers(first) == [0, 1, 2, 3]
        assert lane.at_hand(first.after) is None
        with pytest.raises(TaskFailed, match=r"item 5 of .* no such picture"):
            await lane.at(first.after)
        monkeypatch.undo()
        assert numbers(await lane.at(first.after)) == [4, 5, 6, 7]
        lane.drop()

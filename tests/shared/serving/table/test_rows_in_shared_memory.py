"""Rows and their gradients in memory that a trainer and a parameter server on one host share: what moves, who
may overwrite what."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.pserver_service.jobs import push_header, settled, stream
from tests.shared.serving.data_plane.servers import server
from tests.shared.serving.data_plane.streams import over_shm
from tests.shared.serving.table.tables import LAYOUT, NONE, pushed_rows, wanted, whole_blocks
from trainer_agent.data_plane.stream import StreamPserver
from trireme_shared.blocks.buffers import ReceivedMemory
from trireme_shared.protocol.records.layout import ROWS
from trireme_shared.protocol.wire.messages import PushBlock
from trireme_shared.serving.data_plane.stream import STREAMS
from trireme_shared.serving.transport import shared_memory
from trireme_shared.serving.transport.shared_memory import AnswerMemory, GradientMemory, Region
from trireme_shared.serving.transport.stream import FrameStream
from trireme_shared.tables.payload import joined, rows_in

__all__ = ["server"]
MANY = np.arange(40_000, dtype=np.int64)
ROW_BYTES = MANY.size * 2 * 4  # of table 0


def came_in(monkeypatch):
    came, updated = [], FrameStream.buffer_updated
    monkeypatch.setattr(
        FrameStream, "buffer_updated", lambda self, count: came.append(count) or updated(self, count)
    )
    return came


async def looked_up(server, version, keys=MANY):
    end, rows = await server.client.lookup(*wanted(version, keys, NONE, wait_s=10))
    assert end.code == "OK"
    return rows_in(rows, (len(keys), 0), (2, 3), ids=False)[0]


def lent(memory: GradientMemory, value: float = 1.0, lane: int = 0):
    payload = joined([MANY, NONE], [np.full((MANY.size, 2), value, np.float32)], None, memory.take)
    return PushBlock(block=ROWS, lanes=(lane, lane + 1), count=2, rows=(MANY.size, 0)), payload


async def step(server, number, *items):
    others = [pushed_rows(lane, NONE, NONE) for lane in range(len(items), 4)]
    return await push(server, number, *whole_blocks(), *items, *others)


async def push(server, number, *items):
    """Payloads stay in the memory in which they are, or are sent from there."""
    return await StreamPserver.push(server.client, push_header(number), stream(*items))


@over_shm
async def test_neither_rows_nor_gradients_go_through_the_stream(server, monkeypatch):
    await server.initialise(LAYOUT)
    memory = GradientMemory()
    await step(server, 0, lent(memory))
    came = came_in(monkeypatch)
    for number in (1, 2):
        await looked_up(server, number, MANY[:1])  # waits for the version
        answer = await step(server, number, lent(memory))
        assert (answer.applied, answer.refused) == (7, ())
    assert sum(came) < 20_000, f"the gradients of two steps are {2 * (ROW_BYTES + MANY.nbytes)} bytes"
    assert memory.bytes == 1 << 20, "one push after the other has the same memory"
    came.clear()
    found = await looked_up(server, 3)
    assert (found == 0.5 - 3 / 4).all()
    assert sum(came) < ROW_BYTES / 2 + MANY.nbytes, "the rows came through the stream"
    await settled(server.pserver)
    answers = server.app[STREAMS].answers
    assert (answers.bytes, answers.lent_bytes) == (1 << 19, 0)
    for _ in range(5):
        await looked_up(server, 3)
    assert (answers.bytes, answers.lent_bytes) == (1 << 19, 0), "memory of answers is used again"


@over_shm
async def test_gradients_that_change_after_they_were_taken_change_nothing(server):
    """Ids that were checked above all: a trainer could make them those of another server, or unsorted."""
    await server.initialise(LAYOUT)
    memory = GradientMemory()
    item, payload = lent(memory)
    answer = await push(server, 0, *whole_blocks(), (item, payload))
    assert answer.applied == 4
    payload[:] = bytes(payload.nbytes)
    await push(server, 0, *(pushed_rows(lane, NONE, NONE) for lane in (1, 2, 3)))
    found = await looked_up(server, 1)
    assert (found == 0.5 - 1 / 4).all()
    assert server.pserver.store.rows.rows == MANY.size


@over_shm
async def test_beyond_the_limit_of_memory_rows_go_through_the_stream(server, monkeypatch):
    await server.initialise(LAYOUT)
    monkeypatch.setattr(shared_memory, "MOST_BYTES", 1 << 18)
    came, memory = came_in(monkeypatch), GradientMemory()
    await step(server, 0, lent(memory))
    assert sum(came) > ROW_BYTES + MANY.nbytes
    came.clear()
    assert (await looked_up(server, 1) == 0.5 - 1 / 4).all()
    assert sum(came) > ROW_BYTES
    assert server.app[STREAMS].answers.bytes == 0


def test_memory_of_gradients_is_used_again_when_nobody_refers_to_it():
    memory, size = GradientMemory(), 300_000
    first = memory.take(size)
    second = memory.take(size)
    regions = {first.obj.name, second.obj.name}
    assert (first.nbytes, len(regions), isinstance(first.obj, Region)) == (size, 2, True)
    part = first[10:]
    del first
    third = memory.take(size)
    assert third.obj.name not in regions, "a part of the first one is in use"
    del part
    fourth = memory.take(size - 1)
    assert fourth.obj.name in regions
    fourth.obj.lost = True
    del fourth
    assert memory.take(size).obj.name not in regions, "somebody may read it still"
    assert not isinstance(memory.take(1000).obj, Region)


def test_memory_of_gradients_has_a_limit(monkeypatch):
    monkeypatch.setattr(shared_memory, "MOST_BYTES", 3 << 18)
    memory = GradientMemory()
    held = [memory.take(1 << 18) for _ in range(4)]
    assert [isinstance(each.obj, Region) for each in held] == [True, True, True, False]
    held.clear()
    assert isinstance(memory.take(1 << 19).obj, Region), "regions of other sizes give way"
    assert memory.bytes == 3 << 18


def test_memory_of_payloads_is_used_again_when_nobody_refers_to_it():
    memory, size = ReceivedMemory(), 300_000
    first = np.frombuffer(memory.take(size), np.int64)
    first[:] = 7
    second = memory.copied(memoryview(bytes(size)))
    assert (first == 7).all()
    assert memory.bytes == 2 << 19
    where = first.ctypes.data
    del first
    third = memory.take(size + 1)
    assert np.frombuffer(third, np.uint8).ctypes.data == where
    assert (third.nbytes, second.nbytes, memory.bytes) == (size + 1, size, 2 << 19)
    memory.take(1000)
    assert memory.bytes == 2 << 19, "small ones are not kept"


def refused(*_):
    raise OSError("no memfd")


def test_without_shared_memory_payloads_are_private(monkeypatch):
    monkeypatch.setattr(os, "memfd_create", refused)
    assert not isinstance(GradientMemory().take(300_000).obj, Region)


def test_without_shared_memory_answers_are_sent_and_nothing_is_copied(monkeypatch):
    monkeypatch.setattr(os, "memfd_create", refused)
    answers = AnswerMemory()
    for _ in range(2):
        assert answers.copied(memoryview(bytes(300_000))) is None
    assert answers.bytes == answers.lent_bytes == 0


@pytest.mark.parametrize("size", [0, 1000])
def test_small_answers_are_sent(size):
    assert AnswerMemory().copied(memoryview(bytes(size))) is None

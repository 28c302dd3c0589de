"""Tables over streams, on both event loops, and over plain requests: lookups that wait, steps in portions,
roll-backs."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.pserver_service.jobs import (
    JOB,
    PLAIN,
    async_header,
    layout_of,
    pull_request,
    push_header,
    settled,
    stream,
)
from tests.pserver_service.membership.test_index import SPEC
from tests.shared.serving.data_plane.servers import TRANSPORTS, server
from tests.shared.serving.data_plane.streams import streamed
from tests.shared.serving.table.tables import (
    LAYOUT,
    NONE,
    ids,
    pushed_rows,
    step_of,
    values_in,
    wanted,
    whole_blocks,
)
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.protocol.errors import BadFrame, CallerError, InvalidArgument, NotReady
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobState, Mode, SlotMap, TrainerList
from trireme_shared.protocol.records.layout import ROWS
from trireme_shared.protocol.wire.messages import LedgerQuery, PushBlock, TableRequest, Verdict
from trireme_shared.serving.core.store import missing_lanes
from trireme_shared.serving.core.table import rows as table_rows
from trireme_shared.serving.core.table.rows import TableRows
from trireme_shared.serving.data_plane import row_turns
from trireme_shared.tables.payload import joined, rows_in

__all__ = ["server"]
everywhere = pytest.mark.parametrize("server", TRANSPORTS, indirect=True)
KEYS = ids(1, 2), ids(7)


async def made(server, layout=LAYOUT):
    await server.initialise(layout)


async def push(server, step, items, **fields):
    return await server.client.push(push_header(step, **fields), stream(*items))


async def rows_at(server, version, *keys, **fields):
    """(code, values): values of each table."""
    end, rows = await server.client.lookup(*wanted(version, *keys, **{"wait_s": 10, **fields}))
    return end.code, values_in(rows, *(len(some) for some in keys)) if end.code == "OK" else rows.nbytes


@asynccontextmanager
async def waiting(server, version, *keys, **fields):
    """A lookup that the server has and that has to wait."""
    looking = asyncio.ensure_future(rows_at(server, version, *keys, **{"wait_s": 20, **fields}))
    before = len(server.pserver.lookups)
    async with asyncio.timeout(5):
        while len(server.pserver.lookups) == before:
            await asyncio.sleep(0.001)
    yield looking
    assert not server.pserver.lookups


@everywhere
async def test_rows_go_out_and_gradients_come_in(server):
    await made(server)
    assert await rows_at(server, 0, *KEYS) == ("OK", [[[0.5] * 2] * 2, [[0.5] * 3]])
    answer = await push(server, 0, step_of(KEYS))
    assert (answer.applied, answer.refused) == (7, ())
    assert await rows_at(server, 1, *KEYS) == ("OK", [[[-0.5] * 2] * 2, [[-0.5] * 3]])
    assert await rows_at(server, 0, *KEYS) == ("OK", [[[0.5] * 2] * 2, [[0.5] * 3]])
    assert await rows_at(server, 1, NONE, NONE) == ("OK", [[], []])
    await push(server, 1, step_of(KEYS))
    assert await rows_at(server, 0, *KEYS) == ("GONE", 0)


@everywhere
async def test_rows_and_gradients_travel_in_bfloat16_where_both_say_so(server):
    await made(server)
    keys, third = [KEYS[0], NONE], np.full((2, 2), 1 / 3, np.float32)
    item = PushBlock(block=ROWS, lanes=(0, 1), count=2, dtype="bfloat16", rows=(2, 0))
    others = [pushed_rows(lane, *keys, value=0.0) for lane in range(1, 4)]
    answer = await push(
        server, 0, [*whole_blocks(), (item, bytes(joined(keys, [third, third[:0]], "bfloat16"))), *others]
    )
    assert answer.refused == ()
    value = np.float32(0.5) - np.float32(0.333984375) / 4  # bfloat16's third
    request, ids = wanted(1, *keys, wait_s=10, dtype="bfloat16")
    end, rows = await server.client.lookup(request, ids)
    (found, _) = rows_in(rows, (2, 0), (2, 3), ids=False, dtype="bfloat16")
    assert (end.code, rows.nbytes) == ("OK", 8)
    assert found.tolist() == [[float(torch.tensor(value).bfloat16())] * 2] * 2
    assert (await rows_at(server, 1, *keys))[1][0] == [[float(value)] * 2] * 2


@everywhere
async def test_a_row_that_does_not_fit_float16_is_said_in_a_word(server):
    await made(server)
    items = [*whole_blocks(), *(pushed_rows(lane, ids(1), NONE, value=-70000.0) for lane in range(4))]
    assert (await push(server, 0, items)).refused == ()
    request, payload = wanted(1, ids(1), NONE, wait_s=10, dtype="float16")
    end, _ = await server.client.lookup(request, payload)
    assert (end.code, end.message) == (
        "OVERFLOW",
        "a row of the tables: 70000.5 does not fit float16, which ends at 65504",
    )


@everywhere
async def test_an_asynchronous_push_steps_rows_when_it_arrives_and_the_newest_ones_are_read(server):
    await server.initialise(LAYOUT, Mode.ASYNC, 1)
    for start, found in ((0, -0.5), (1, -1.5), (1, -1.5)):
        header = async_header(3, start, start + 1, 4)
        answer = await server.client.push(header, stream(*whole_blocks((0, 1)), pushed_rows(0, *KEYS)))
        assert (answer.applied + answer.duplicate, answer.refused) == (4, ())
        assert await rows_at(server, None, *KEYS) == ("OK", [[[found] * 2] * 2, [[found] * 3]])
    end, _ = await server.client.table(TableRequest(job=JOB, generation=1, version=None, table=1))
    assert (end.rows, end.total) == (1, 1)
    assert (await server.client.ledger(LedgerQuery(epoch=0, task_id="3"))).next == 2
    with pytest.raises(CallerError, match="ask for None"):
        await rows_at(server, 2, *KEYS)


@everywhere
async def test_a_lookup_waits_for_its_version(server):
    await made(server)
    async with waiting(server, 1, ids(2), NONE) as looking:
        await push(server, 0, step_of(KEYS))
        assert await looking == ("OK", [[[-0.5] * 2], []])
    assert await rows_at(server, 5, ids(2), NONE, wait_s=0.01) == ("TOO_EARLY", 0)


@everywhere
async def test_a_lookup_that_waits_hears_of_a_roll_back(server):
    await made(server)
    async with waiting(server, 1, ids(2), NONE) as looking:
        server.pserver.drop(2)
        assert await looking == ("NOT_READY", 0)
    with pytest.raises(NotReady):
        await rows_at(server, 0, ids(2), NONE)


@everywhere
async def test_duplicates_and_lanes_that_come_too_early_change_nothing(server):
    await made(server)
    one = pushed_rows(0, *KEYS)
    assert (await push(server, 0, [one, one])).duplicate == 1
    assert (await push(server, 0, [pushed_rows(0, *KEYS, value=9.0)])).duplicate == 1
    refused = (await push(server, 1, [pushed_rows(1, *KEYS)])).refused
    assert [(each.block, each.lanes, each.code) for each in refused] == [(-1, (1, 2), Verdict.TOO_EARLY)]
    await push(server, 0, [*whole_blocks(), *(pushed_rows(lane, *KEYS) for lane in (1, 2, 3))])
    assert await rows_at(server, 1, *KEYS) == ("OK", [[[-0.5] * 2] * 2, [[-0.5] * 3]])


@everywhere
async def test_ids_of_another_parameter_server_are_refused(server):
    await made(server)
    server.pserver.store.slots = SlotMap(version=2, owners=(1,) * LAYOUT.slot_count)
    assert await rows_at(server, 0, *KEYS) == ("WRONG_OWNER", 0)
    assert [each.code for each in (await push(server, 0, [pushed_rows(0, *KEYS)])).refused] == [
        Verdict.WRONG_OWNER
    ]
    assert await rows_at(server, 0, NONE, NONE) == ("OK", [[], []])
    assert not server.pserver.store.rows.lanes_there


@everywhere
async def test_a_pull_of_a_version_waits_for_the_tables(server):
    await made(server)
    await push(server, 0, [*whole_blocks(), *(pushed_rows(lane, *KEYS) for lane in range(3))])
    assert missing_lanes(server.pserver.store) == ((3, 4),)
    blocks = {number: bytearray(64) for number in range(3)}

    def sink(block):
        return memoryview(blocks[block.block])[: 32 if block.block == 2 else 64]

    early = await server.client.pull(pull_request(1, range(3), wait_s=0.05), sink)
    assert (early.code, "rows of tables are at 0" in early.message) == ("TOO_EARLY", True)
    pulling = asyncio.ensure_future(server.client.pull(pull_request(1, range(3), wait_s=20), sink))
    async with asyncio.timeout(5):
        while not server.pserver.pulls:
            await asyncio.sleep(0.001)
    await push(server, 0, [pushed_rows(3, NONE, NONE)])
    end = await pulling
    assert (end.code, end.record.version) == ("OK", 1)
    assert missing_lanes(server.pserver.store) == ((0, 4),)


@pytest.mark.parametrize("server", ["tcp", "unix"], indirect=True)
async def test_a_step_in_portions_lets_lookups_wait_and_is_forgotten_by_a_roll_back(server, monkeypatch):
    await made(server)
    monkeypatch.setattr(row_turns, "TURN_S", 0.0)  # as long as it can take
    many = np.arange(30_000)
    seen, turns, steps = [], [], TableRows.steps

    def noted(self, lane_zero):
        for _ in steps(self, lane_zero):
            turns.append(self.judge(0))
            if turns.count(Verdict.TOO_EARLY) == 3:
                seen.append(asyncio.ensure_future(rows_at(server, 0, *KEYS)))
            yield

    monkeypatch.setattr(TableRows, "steps", noted)
    await push(server, 0, step_of((many, ids(7))))
    assert await rows_at(server, 1, *KEYS, wait_s=20) == ("OK", [[[-0.5] * 2] * 2, [[-0.5] * 3]])
    first = turns.index(Verdict.TOO_EARLY)
    assert 3 < first < len(turns) - 5
    assert set(turns[:first]) == {None}  # room is made
    assert set(turns[first:]) == {Verdict.TOO_EARLY}
    assert await seen[0] == ("OK", [[[0.5] * 2] * 2, [[0.5] * 3]])
    store, before = server.pserver.store, len(turns)
    pushing = asyncio.ensure_future(push(server, 1, step_of((many, ids(7)))))
    async with asyncio.timeout(5):
        while len(turns) < before + 2:
            await asyncio.sleep(0)
    server.pserver.drop(2)
    await pushing
    assert store.rows.stepping
    assert store.rows.version == 1
    with pytest.raises(NotReady):
        await rows_at(server, 1, *KEYS)
    copies = store.rows.copies()  # whoever copied rows of the version that is gone does not wait for ever
    await asyncio.sleep(0)
    for copied in copies:
        copied.close()


@pytest.mark.parametrize("server", ["tcp"], indirect=True)
async def test_a_step_waits_until_a_snapshot_that_keeps_too_much_is_read_or_given_up(server, monkeypatch):
    await made(server)
    rows = server.pserver.store.rows
    server.pserver.directory = told = Directory(Etcd(SimulatedEtcd().transport("pserver")), Keys(JOB))
    told.state = JobState(generation=1)
    told.trainers = TrainerList(generation=1, names=("t",))
    told.spec = SPEC.model_copy(update={"snapshot_bytes": 50})  # less than a user may choose
    await push(server, 0, step_of(KEYS))
    assert (await rows_at(server, 1, *KEYS, wait_s=20))[0] == "OK"
    copies = rows.copies()
    await push(server, 1, step_of(KEYS))
    assert await rows_at(server, 2, *KEYS, wait_s=20) == ("OK", [[[-1.5] * 2] * 2, [[-1.5] * 3]])
    assert sum(each.kept_bytes for each in copies) == 76
    await push(server, 2, step_of(KEYS))
    assert (await rows_at(server, 3, *KEYS, wait_s=0.1))[0] == "TOO_EARLY"
    assert (await rows_at(server, 2, *KEYS))[0] == "OK"  # what is there can be read
    for each in copies:
        written = [each.read(group).content[:, : each.spec.dim] for group in each.groups()]
        assert np.array_equal(np.concatenate(written), np.full((each.rows, each.spec.dim), -0.5))
        each.close()
    assert (await rows_at(server, 3, *KEYS, wait_s=20))[0] == "OK"
    assert rows.kept.waited_s >= 0.1
    monkeypatch.setattr(table_rows, "LIMIT_S", 0.2)
    stuck = rows.copies()
    for step in (3, 4):
        await push(server, step, step_of(KEYS))
        assert (await rows_at(server, step + 1, *KEYS, wait_s=20))[0] == "OK"
    assert sum(each.kept_bytes for each in stuck) == 0
    with pytest.raises(
        InvalidArgument, match=r"kept \d+ bytes of rows for it, 50 are allowed, and none were written"
    ):
        stuck[0].read(next(stuck[0].groups()))


@streamed
async def test_a_refused_lookup_leaves_the_stream_to_the_other_calls(server):
    await made(server)
    await push(server, 0, step_of(KEYS))
    connection = server.client.stream
    async with waiting(server, 2, *KEYS) as looking:
        for _ in range(70):  # more than may be open at once
            with pytest.raises(BadFrame, match="for 2 tables"):
                await rows_at(server, 1, *KEYS, ids(3))
        await push(server, 1, step_of(KEYS))
        assert (await looking)[0] == "OK"
    assert server.client.stream is connection


@everywhere
async def test_a_job_without_tables_has_no_rows(server):
    await made(server, layout_of(40, optimizer=PLAIN))
    with pytest.raises(CallerError, match="without embedding tables"):
        await rows_at(server, 0, *KEYS)
    refused = (await push(server, 0, [pushed_rows(0, NONE, NONE), *whole_blocks()])).refused
    assert [each.code for each in refused] == [Verdict.LAYOUT_MISMATCH]
    assert [state.version for state in server.pserver.store.blocks.values()] == [1, 1, 1]
    await settled(server.pserver)

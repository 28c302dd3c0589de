"""Frames of lookups and rows as no trainer sends them: refused, with bounded memory, and no row changes."""

from __future__ import annotations

import asyncio
import math
import tracemalloc

import numpy as np
import pytest

from tests.pserver_service.jobs import JOB, push_header, stream
from tests.shared.serving.data_plane.servers import server
from tests.shared.serving.data_plane.streams import opening, over_tcp, raw_stream
from tests.shared.serving.table.tables import LAYOUT, NONE, ids, pushed_rows, step_of, values_in, wanted
from trireme_shared.protocol.records.layout import ROWS
from trireme_shared.protocol.wire import codec
from trireme_shared.protocol.wire.messages import LookupRequest, Verdict
from trireme_shared.serving.core.table import rows as table_rows
from trireme_shared.tables.payload import MOST_BYTES

__all__ = ["server"]
pytestmark = over_tcp
KEYS = ids(1, 2), ids(7)
HUGE = 10**9


def looking(number: int = 1, counts=(2, 1), version=0, **fields) -> bytes:
    message = codec.plain(LookupRequest(job=JOB, generation=1, version=version, rows=counts, **fields))
    return codec.encode({"id": number, "call": "lookup", "message": message})


def ids_frame(payload: bytes, number: int = 1, size: int | None = None) -> bytes:
    return (
        codec.encode_block({"id": number, "lookup": True}, len(payload) if size is None else size) + payload
    )


def rows_frame(payload: bytes, number: int = 1, size: int | None = None, **fields) -> bytes:
    header = {"id": number, "block": ROWS, "lanes": (0, 1), "count": 2, "rows": (2, 1)} | fields
    return codec.encode_block(header, len(payload) if size is None else size) + payload


def end(number: int = 1) -> bytes:
    return codec.encode({"id": number, "end": True})


GOOD_IDS, GOOD_ROWS = bytes(wanted(0, *KEYS)[1]), pushed_rows(0, *KEYS)[1]


async def unharmed(server) -> None:
    """It trains and answers others, from the rows it had."""
    store = server.pserver.store
    assert (store.rows.rows, store.rows.version, store.rows.lanes_there) == (0, 0, frozenset())
    assert not server.pserver.lookups
    assert (await server.client.push(push_header(0), stream(*step_of(KEYS)))).applied == 7
    found, rows = await server.client.lookup(*wanted(1, *KEYS, wait_s=10))
    assert found.code == "OK"
    assert values_in(rows, 2, 1) == [[[-0.5] * 2] * 2, [[-0.5] * 3]]


async def answer_to(server, *frames: bytes) -> dict:
    """What comes last, before the connection is closed or a call ends. Little memory is used."""
    tracemalloc.start()
    try:
        async with raw_stream(server) as raw:
            raw.send(b"".join(frames))
            found = await raw.next()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20, f"{peak} bytes"
    return found


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([looking(counts=(HUGE, 0)), ids_frame(b"", size=(1 << 32) - 1)], "use a smaller minibatch"),
        ([looking(counts=(2**63, 2**63))], "use a smaller minibatch"),
        ([looking(counts=(2,))], "for 2 tables"),
        ([looking(counts=(2, 1, 1))], "for 2 tables"),
        ([looking(counts=(3, -1))], "for 2 tables"),
        ([looking(), ids_frame(GOOD_IDS[:-1])], "23 bytes of ids"),
        ([looking(), ids_frame(GOOD_IDS + b"-")], "25 bytes of ids"),
        ([looking(), ids_frame(GOOD_IDS), ids_frame(GOOD_IDS)], "belong to no lookup"),
        ([looking(), ids_frame(b"", size=MOST_BYTES)], "belong to no lookup"),
        ([looking(counts=(2, 0)), ids_frame(ids(2, 1).tobytes()), end()], "do not ascend"),
        ([looking(counts=(2, 0)), ids_frame(ids(2, 2).tobytes()), end()], "do not ascend"),
        ([looking(), end()], "without its ids"),
        (
            [looking(version=9, wait_s=9), ids_frame(GOOD_IDS), end(), end()],
            "ended without its ids, or twice",
        ),
        ([looking(), looking()], "call 1 is open already"),
        ([ids_frame(GOOD_IDS, 7), end(7)], "call 7 is open already, or its message is no map"),
        ([looking(number) for number in range(65)], "more than 64 calls"),
        ([looking(number, (20_000_000, 0)) for number in range(3)], "ids at once: await their answers"),
    ],
)
async def test_a_lookup_that_cannot_be_is_refused(server, frames, why):
    await server.initialise(LAYOUT)
    found = await answer_to(server, *frames)
    assert why in found["error"]["message"], found
    await unharmed(server)


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (rows_frame(GOOD_ROWS, rows=(2,)), Verdict.BAD_FRAME),
        (rows_frame(GOOD_ROWS, rows=(2, 1, 0)), Verdict.BAD_FRAME),
        (rows_frame(GOOD_ROWS, rows=(3, -1)), Verdict.BAD_FRAME),
        (rows_frame(GOOD_ROWS, rows=(HUGE, 0)), Verdict.BAD_FRAME),
        (rows_frame(GOOD_ROWS, rows=None), Verdict.LAYOUT_MISMATCH),
        (rows_frame(GOOD_ROWS[:-1]), Verdict.BAD_FRAME),
        (rows_frame(GOOD_ROWS[:37], dtype="bfloat16"), Verdict.BAD_FRAME),
        (rows_frame(ids(2, 1).tobytes() + bytes(16), rows=(2, 0)), Verdict.BAD_FRAME),
        (rows_frame(ids(2, 2).tobytes() + bytes(16), rows=(2, 0)), Verdict.BAD_FRAME),
        (rows_frame(GOOD_ROWS, count=-1), Verdict.LAYOUT_MISMATCH),
        (rows_frame(GOOD_ROWS, lanes=(0, 2)), Verdict.LAYOUT_MISMATCH),
        (rows_frame(GOOD_ROWS, lanes=(2, 3)), Verdict.LAYOUT_MISMATCH),  # the header is of lanes 0 and 1
        (rows_frame(GOOD_ROWS, lanes=(4, 5)), Verdict.LAYOUT_MISMATCH),
        (rows_frame(GOOD_ROWS, lanes=(-1, 0)), Verdict.LAYOUT_MISMATCH),
    ],
    ids=lambda each: str(each) if isinstance(each, Verdict) else "",
)
async def test_rows_that_cannot_be_are_refused(server, frame, code):
    await server.initialise(LAYOUT)
    found = await answer_to(server, opening(lanes=(0, 1)), frame, end())
    if "error" in found:
        assert (found["error"]["code"], code) == ("BAD_FRAME", Verdict.BAD_FRAME)
    else:
        assert [each["code"] for each in found["message"]["refused"]] == [code]
    await unharmed(server)


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (rows_frame(b"", size=MOST_BYTES), "at most 52 bytes each"),
        (rows_frame(GOOD_ROWS + b"-"), "at most 52 bytes each"),
        (rows_frame(b"", rows=None, size=MOST_BYTES), "at most 64 bytes each"),
        (rows_frame(GOOD_ROWS, number=2), "belongs to no push"),
        (rows_frame(GOOD_ROWS, count=math.nan), "count"),
        (rows_frame(GOOD_ROWS, count=2**62), "count"),
        (rows_frame(GOOD_ROWS, rows=(0,) * 4000), "rows"),
    ],
    ids=lambda each: "" if isinstance(each, bytes) else each,
)
async def test_a_stream_ends_when_no_payload_can_be_taken(server, frame, why):
    await server.initialise(LAYOUT)
    found = await answer_to(server, opening(lanes=(0, 1)), frame, end())
    assert why in found["error"]["message"], found
    await unharmed(server)


async def test_rows_that_nobody_reads_are_made_one_answer_at_a_time(server, monkeypatch):
    await server.initialise(LAYOUT)
    keys, calls = np.arange(100_000), 60
    made = 0
    reading = table_rows.RowsReading

    def counted(*asked):
        nonlocal made
        made += 1
        return reading(*asked)

    monkeypatch.setattr(table_rows, "RowsReading", counted)
    async with raw_stream(server) as raw:
        raw.transport.pause_reading()
        for number in range(calls):
            raw.transport.write(
                looking(number, (len(keys), 0)) + ids_frame(keys.tobytes(), number) + end(number)
            )
        async with asyncio.timeout(20):
            while len(server.pserver.lookups) + made < calls:
                await asyncio.sleep(0.01)
        assert 0 < made <= calls // 2  # what the sockets take
        raw.transport.resume_reading()
        ends = [await raw.next(20) for _ in range(calls)]
    assert {each["message"]["code"] for each in ends} == {"OK"}
    assert sorted(each["id"] for each in ends) == list(range(calls))


async def test_a_lane_without_ids_is_there_all_the_same(server):
    await server.initialise(LAYOUT)
    items = [*step_of(KEYS)[:-1], pushed_rows(3, NONE, NONE)]
    assert (await server.client.push(push_header(0), stream(*items))).applied == 7
    found, rows = await server.client.lookup(*wanted(1, *KEYS, wait_s=10))
    assert (found.code, values_in(rows, 2, 1)) == ("OK", [[[-0.25] * 2] * 2, [[-0.25] * 3]])

"""A lookup of many ids is read in turns, so that the event loop goes on; it has the rows of one version all
the same."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.pserver_service.checkpoints import parts
from tests.pserver_service.jobs import init_header
from tests.shared.serving.data_plane.servers import TRANSPORTS, server
from tests.shared.serving.table.tables import LAYOUT, SPECS, ids, ones, step_of, values_in, wanted
from tests.shared.serving.table.test_arrivals import push
from tests.shared.serving.table.test_stream_lookups import KEYS, made, rows_at
from tests.shared.serving.table.test_stream_lookups import push as push_by_stream
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.wire.messages import LookupEnd
from trireme_shared.serving.block_server import BlockServer
from trireme_shared.serving.core.store import Store
from trireme_shared.serving.core.stores import store_of
from trireme_shared.serving.core.table import rows as table_rows
from trireme_shared.serving.data_plane.lookups import OpenLookup

__all__ = ["server"]
TABLES = LAYOUT.model_copy(update={"slot_count": 128, "segments": ()})
MANY = np.arange(10), np.arange(100, 105)
LANES = 4


@pytest.fixture(autouse=True)
def _few_at_once(monkeypatch):
    monkeypatch.setattr(table_rows, "READ_AT_ONCE", 4)


def served(mode: Mode, lanes: int) -> BlockServer:
    store = store_of(init_header(TABLES, mode, lanes))
    store.seal()
    store.slots = parts.slot_map(1)
    pserver = BlockServer("ctr", "ps-1", 0)
    pserver.serve_store(store, 0)
    return pserver


def step(store: Store) -> None:
    rows = store.rows
    for lane in range(LANES):
        rows.push(rows.version, lane, MANY, ones(MANY), 2)
    for _ in rows.steps():
        pass


class Looking:
    """A lookup that is asked by hand."""

    def __init__(self, pserver: BlockServer, version: int | None, **fields: object) -> None:
        request, payload = wanted(version, *MANY, wait_s=10, **fields)
        self.woken = asyncio.Event()
        self.opened = OpenLookup(pserver, request, payload, self.woken.set)

    async def turn(self) -> object:
        found = self.opened.answer()
        if found is None:
            async with asyncio.timeout(5):
                await self.woken.wait()
            self.woken.clear()
        return found

    async def rest(self) -> tuple[list[list[list[float]]] | str, int | None]:
        while (found := await self.turn()) is None:
            pass
        if isinstance(found, LookupEnd):
            return found.code, None
        rows, end = found
        return values_in(rows, *map(len, MANY)), end.version


def expected(value: float) -> list[list[list[float]]]:
    return [[[value] * spec.dim] * len(some) for spec, some in zip(SPECS, MANY, strict=True)]


async def test_it_has_as_many_turns_as_it_needs():
    looking, turns = Looking(served(Mode.SYNC, LANES), 0), 1
    while await looking.turn() is None:
        turns += 1
    assert turns == 4, "15 ids, 4 of them in a turn"


@pytest.mark.parametrize("version", [1, None])
async def test_a_step_between_its_turns_changes_nothing(version):
    pserver = served(Mode.SYNC, LANES)
    step(pserver.store)
    looking = Looking(pserver, version)
    assert await looking.turn() is None
    step(pserver.store)
    assert (await looking.rest())[0] == expected(-0.5)


async def test_two_steps_between_its_turns_end_it_or_begin_it_again():
    pserver = served(Mode.SYNC, LANES)
    step(pserver.store)
    of_version, newest = Looking(pserver, 1), Looking(pserver, None)
    for looking in (of_version, newest):
        assert await looking.turn() is None
    for _ in range(2):
        step(pserver.store)
    assert (await of_version.rest())[0] == "GONE"
    assert (await newest.rest())[0] == expected(-2.5)


async def test_nothing_is_read_while_rows_change_and_a_wake_more_is_no_turn_more():
    pserver = served(Mode.SYNC, LANES)
    looking = Looking(pserver, 0)
    assert looking.opened.answer() is None
    assert looking.opened.answer() is None, "its turn has not come"
    pserver.store.rows.changing = True
    await looking.woken.wait()
    looking.woken.clear()
    assert looking.opened.answer() is None
    pserver.store.rows.changing = False
    assert (await looking.rest())[0] == expected(0.5)


async def test_an_asynchronous_one_says_how_old_its_oldest_rows_are():
    pserver = served(Mode.ASYNC, 1)
    assert push(pserver.store, 0, 0, *MANY) == "APPLIED"
    looking = Looking(pserver, None)
    assert await looking.turn() is None
    assert push(pserver.store, 0, 1, *MANY) == "APPLIED"
    (items, users), version = await looking.rest()
    assert (version, items[0], items[-1], users[-1]) == (1, [-0.5] * 2, [-1.5] * 2, [-1.5] * 3)


async def test_slots_that_leave_between_its_turns_end_it():
    pserver = served(Mode.SYNC, LANES)
    looking = Looking(pserver, 0)
    assert await looking.turn() is None
    pserver.store.slots = parts.slot_map(2, version=2)
    assert (await looking.rest())[0] == "WRONG_OWNER"


async def test_a_narrow_one_is_cast_turn_by_turn():
    pserver = served(Mode.SYNC, LANES)
    step(pserver.store)
    looking = Looking(pserver, 1, dtype="float16")
    while (found := await looking.turn()) is None:
        pass
    assert np.frombuffer(found[0], np.float16).tolist() == [-0.5] * (10 * 2 + 5 * 3)


@pytest.mark.parametrize("server", TRANSPORTS, indirect=True)
async def test_many_at_once_are_all_answered(server):
    await made(server)
    await push_by_stream(server, 0, step_of(KEYS))
    asked = [rows_at(server, 1, np.arange(first, first + 9), ids(7)) for first in range(20)]
    values = {1: [-0.5] * 2, 2: [-0.5] * 2}
    for first, (code, found) in enumerate(await asyncio.gather(*asked)):
        assert (code, found[1]) == ("OK", [[-0.5] * 3])
        assert found[0] == [values.get(key, [0.5] * 2) for key in range(first, first + 9)]

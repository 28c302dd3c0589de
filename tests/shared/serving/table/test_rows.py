"""The tables of one parameter server by themselves: lanes, versions, owners, and lookups."""

from __future__ import annotations

import numpy as np
import pytest

from tests.pserver_service.jobs import init_header, push_header
from tests.shared.serving.table.tables import LAYOUT, NONE, SPECS, ids, ones, pushed_rows, values_in
from trireme_shared.protocol.errors import BadFrame
from trireme_shared.protocol.records import Mode, SlotMap
from trireme_shared.protocol.wire.messages import Verdict
from trireme_shared.serving.block_server import BlockServer
from trireme_shared.serving.core.calls import OpenPush
from trireme_shared.serving.core.store import Store
from trireme_shared.serving.core.stores import store_of
from trireme_shared.serving.core.table.rows import TableRows
from trireme_shared.serving.core.table.stepping import StepsAtOnce
from trireme_shared.serving.ports import ServerPorts
from trireme_shared.tables.hashing import slots_of


def pushed(rows: TableRows, step: int, lane: int, *keys: np.ndarray, value: float = 1.0) -> Verdict:
    return rows.push(step, lane, keys, ones(keys, value), 2)


def stepped(rows: TableRows, *keys: np.ndarray, value: float = 1.0) -> None:
    for lane in range(rows.lanes):
        assert pushed(rows, rows.version, lane, *keys, value=value) is Verdict.APPLIED
    for _ in rows.steps():
        pass


def found(rows: TableRows, version: int, *keys: np.ndarray) -> list[list[list[float]]]:
    return values_in(rows.lookup(version, keys), *(len(some) for some in keys))


def test_the_step_is_made_of_all_lanes_once_each_whatever_comes_twice():
    rows = TableRows(LAYOUT, 2, 0)
    assert pushed(rows, 0, 1, ids(1), NONE) is Verdict.APPLIED
    assert pushed(rows, 0, 1, ids(1), NONE, value=50.0) is Verdict.DUPLICATE
    assert (rows.is_whole, rows.lanes_there) == (False, {(1, 2)})
    assert (
        pushed(rows, 0, 0, NONE, ids(9)) is Verdict.APPLIED
    )  # without an id of the first table: it is there all the same
    assert rows.is_whole
    list(rows.steps())
    assert (rows.version, rows.lanes_there) == (1, frozenset())
    assert pushed(rows, 0, 0, ids(1), NONE) is Verdict.DUPLICATE
    assert pushed(rows, 2, 0, ids(1), NONE) is Verdict.TOO_EARLY
    assert found(rows, 1, ids(1), ids(9)) == [[[0.0, 0.0]], [[0.0, 0.0, 0.0]]]  # 0.5 - (1 + 0) / 2


def test_the_version_before_is_whole_and_the_one_before_that_is_gone():
    rows = TableRows(LAYOUT, 1, 0)
    stepped(rows, ids(1), NONE)
    stepped(rows, ids(1, 2), ids(3))
    assert found(rows, 1, ids(1, 2), ids(3)) == [[[-0.5, -0.5], [0.5, 0.5]], [[0.5] * 3]]
    assert found(rows, 2, ids(1, 2), ids(3)) == [[[-1.5, -1.5], [-0.5, -0.5]], [[-0.5] * 3]]
    assert [rows.judge(version) for version in (0, 1, 2, 3)] == [Verdict.GONE, None, None, Verdict.TOO_EARLY]


def test_rows_that_were_loaded_have_no_version_before():
    rows = TableRows(LAYOUT, 1, 7)
    assert [rows.judge(version) for version in (6, 7, 8)] == [Verdict.GONE, None, Verdict.TOO_EARLY]


def test_rows_can_be_read_while_room_is_made_for_new_ones_but_not_while_they_change():
    rows = TableRows(LAYOUT, 1, 0)
    stepped(rows, ids(1), NONE)
    pushed(rows, 1, 0, ids(1, 2), ids(2))
    steps = rows.steps()
    read, turns = [], 0
    for turns, _ in enumerate(steps, 1):
        if turns == 1:
            assert pushed(rows, 1, 0, ids(1, 2), ids(2)) is Verdict.DUPLICATE
            assert not rows.is_whole  # it is not stepped twice
        verdicts = [rows.judge(version) for version in (0, 1, 2)]
        if verdicts == [None, None, Verdict.TOO_EARLY]:
            read.append(found(rows, 1, ids(1, 2), ids(2)))
        else:
            assert verdicts == [Verdict.TOO_EARLY] * 3
    assert 0 < len(read) < turns
    assert read == [[[[-0.5, -0.5], [0.5, 0.5]], [[0.5] * 3]]] * len(read)
    assert [rows.judge(version) for version in (0, 1, 2)] == [Verdict.GONE, None, None]


class StepsLater(StepsAtOnce):
    """The step is taken by the test."""

    def begin(self, store: Store) -> None:
        pass


@pytest.mark.parametrize(
    "referred", [True, False], ids=["in the trainer's memory", "in memory for the next block"]
)
def test_what_was_pushed_may_be_overwritten_afterwards(referred):
    server = BlockServer("ctr", "ps-1", ports=ServerPorts(row_steps=StepsLater))
    server.store = store = store_of(init_header(LAYOUT.model_copy(update={"segments": ()}), Mode.SYNC, 1))
    store.seal()
    item, payload = pushed_rows(0, ids(1), ids(2))
    written = bytearray(payload)
    buffer = None if referred else store.pool.take("float32", len(written) // 4)
    pushing = OpenPush(server, store, push_header(0, [0]))
    pushing.apply(item, memoryview(written).toreadonly() if referred else memoryview(written), buffer)
    assert pushing.answer().refused == ()
    written[:] = bytes(len(written))
    list(store.rows.steps())
    assert found(store.rows, 1, ids(1), ids(2)) == [[[-0.5] * 2], [[-0.5] * 3]]


def test_only_ids_of_its_own_slots_are_owned():
    rows, keys = TableRows(LAYOUT, 1, 0), np.arange(50)
    owners = tuple(slot % 2 for slot in range(LAYOUT.slot_count))
    slots = SlotMap(version=1, owners=owners)
    mine = keys[slots_of(keys, SPECS[0].seed, LAYOUT.slot_count) % 2 == 1]
    assert 0 < len(mine) < 50
    assert rows.are_owned([mine, NONE], slots, 1)
    assert not rows.are_owned([keys, NONE], slots, 1)
    assert rows.are_owned([NONE, NONE], slots, 0)
    assert rows.are_owned([keys, keys], None, 1)


@pytest.mark.parametrize(
    ("counts", "size", "why"),
    [
        ((1, 0, 0), 16, "for 2 tables"),
        ((1,), 16, "for 2 tables"),
        ((-1, 1), 4, "for 2 tables"),
        ((1, 0), 15, "expected 16"),
        ((1, 0), 24, "expected 16"),
        ((10**9, 0), 16, "use a smaller minibatch"),
        ((2**63, 2**63), 16, "use a smaller minibatch"),
    ],
)
def test_counts_that_do_not_fit_are_refused(counts, size, why):
    with pytest.raises(BadFrame, match=why):
        TableRows(LAYOUT, 1, 0).read(counts, memoryview(bytes(size)))


@pytest.mark.parametrize("keys", [(2, 1), (1, 1), (0, 5, 5), (2**63 - 1, -(2**63))])
def test_ids_that_do_not_ascend_are_refused(keys):
    payload = ids(*keys).tobytes() + bytes(8 * len(keys))
    with pytest.raises(BadFrame, match="do not ascend"):
        TableRows(LAYOUT, 1, 0).read((len(keys), 0), memoryview(payload))

"""Memory of rows is touched by another thread before a step needs it: the system may take tens of
milliseconds to give a page."""

from __future__ import annotations

import ctypes
import mmap
import resource
import threading
from concurrent.futures import Future

import numpy as np
import pytest

from tests.equipment.replaced import replaced
from trireme_shared.protocol.records.layout import RowInit, RowOptimizer, TableSpec
from trireme_shared.tables import memory as table_memory
from trireme_shared.tables.kernels import rows as row_loops
from trireme_shared.tables.memory import (
    AT_ONCE,
    BYTES_AT_ONCE,
    CELLS_AT_ONCE,
    PIECE_BYTES,
    SMALL_BYTES,
    Cells,
    TouchedRows,
    rows_at_once,
)
from trireme_shared.tables.table import Table

ROW_BYTES, SHIFT = 256, 15  # chunks of 8 MiB
LARGE = SMALL_BYTES + 2 * PIECE_BYTES


def chunk() -> np.ndarray:
    return np.frombuffer(
        mmap.mmap(-1, ROW_BYTES << SHIFT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.float32
    )


def faults_of(memory: np.ndarray, first: int, last: int) -> int:
    """Pages that the system has to give this thread when it writes bytes [first, last)."""
    bytes_of = memory.view(np.uint8)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    bytes_of[first : last : mmap.PAGESIZE] = 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def wide_table() -> Table:
    """A row has 256 bytes."""
    spec = TableSpec(
        name="t",
        dim=64,
        seed=5,
        optimizer=RowOptimizer(kind="sgd", lr=1.0),
        init=RowInit(kind="constant", scale=0.0),
    )
    return Table(spec, 4)


def test_who_writes_rows_that_are_there_waits_for_no_page():
    chunks, rows = [chunk(), chunk()], TouchedRows(ROW_BYTES, SHIFT)
    asked = (3 << SHIFT) // 2  # into the second chunk
    rows.ask(chunks, asked)
    for _ in rows.until(asked):
        pass
    assert rows.are_there(asked)
    assert asked <= rows.touched <= asked + PIECE_BYTES // ROW_BYTES
    first = table_memory.small_bytes(chunks[0].ctypes.data)
    faults_of(chunks[1], 0, 1)  # the view itself
    assert faults_of(chunks[0], first, chunks[0].nbytes) <= 4
    assert faults_of(chunks[1], 0, chunks[1].nbytes // 2) <= 4
    assert faults_of(chunk(), 0, ROW_BYTES << SHIFT) > 4  # as without it


def test_small_tables_need_no_thread():
    rows = TouchedRows(ROW_BYTES, SHIFT)
    with replaced(table_memory, "_thread", lambda: pytest.fail("a thread was started")):
        rows.ask([chunk()], SMALL_BYTES // ROW_BYTES)
    assert rows.are_there(SMALL_BYTES // ROW_BYTES)
    assert rows.touched == 0


def test_what_is_in_memory_stays_though_it_is_touched_meanwhile():
    memory = chunk().view(np.uint32)
    expected = np.arange(len(memory), dtype=np.uint32)
    toucher = threading.Thread(
        target=lambda: [row_loops.touch(np.uint64(memory.ctypes.data), memory.nbytes) for _ in range(20)]
    )
    toucher.start()
    memory[:] = expected
    memory[:] += 1
    toucher.join()
    assert np.array_equal(memory, expected + 1)


def test_a_step_waits_for_memory_in_turns_and_rows_are_read_meanwhile():
    table, may, touch = wide_table(), threading.Event(), table_memory.touch
    known, coming = np.arange(100), np.arange(LARGE // ROW_BYTES) + 100

    def late(*arguments):
        may.wait(10)
        touch(*arguments)

    table.step(known, -np.ones((100, 64), np.float32))
    with replaced(table_memory, "touch", late), replaced(table_memory, "WAIT_S", 1e-4):
        preparing = table.prepare(coming)
        turns = 100 + len(coming) // AT_ONCE
        out = np.zeros((100, 64), np.float32)
        for _ in range(turns):
            assert next(preparing, "over") is None
        table.lookup(known, out)
        assert (out == 1).all()
        may.set()
        assert sum(1 for _ in preparing) < 10_000
    for _ in table.steps(coming, np.zeros((len(coming), 64), np.float32)):
        pass
    assert table.rows == 100 + len(coming)


def test_a_thread_that_is_gone_delays_a_step_but_does_not_stop_it():
    """As in a process that was forked."""

    class Gone:
        def submit(self, *_):
            return Future()

    table, coming = wide_table(), np.arange(LARGE // ROW_BYTES)
    few = replaced(table_memory, "MOST_WAITS", 3)
    with replaced(table_memory, "_thread", Gone), few, replaced(table_memory, "WAIT_S", 1e-4):
        table.step(coming, -np.ones((len(coming), 64), np.float32))
    out = np.zeros((len(coming), 64), np.float32)
    table.lookup(coming, out)
    assert (out == 1).all()


def test_the_first_cells_of_many_slots_and_of_a_large_one_come_in_turns():
    many, few = Cells(1024, 7), Cells(1, 7)
    assert sum(1 for _ in many.reserve(np.full(1024, 100))) >= many.bytes // (16 * CELLS_AT_ONCE) - 1 >= 4
    assert sum(1 for _ in few.reserve(np.full(1, 200_000))) >= few.bytes // (16 * CELLS_AT_ONCE) - 1 >= 4
    cells = np.ctypeslib.as_array((ctypes.c_uint64 * (few.bytes // 8)).from_address(int(few.addresses[0])))
    assert faults_of(cells, 0, few.bytes) <= 4  # they were touched, in order


def test_of_wide_rows_fewer_are_stepped_at_once():
    assert rows_at_once(48) == AT_ONCE
    assert rows_at_once(3 * 4096) * 3 * 4096 * 4 <= BYTES_AT_ONCE
    assert rows_at_once(1 << 30) == 1

"""The rows of all embedding tables in one trainer of a collective job, stepped as parameter servers step theirs: the same bits.

version s --step_rows: mean gradients of the rows of all slots--> version s + 1; rows of version s can be read until the next step

They take the mean as the gradient of the only lane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from trainer_agent.collective.rows.means import RowMeans
from trireme_shared.checkpoints.start_tables import fit_tables, mark_in, put_rows
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.protocol.errors import Gone, InvalidArgument
from trireme_shared.protocol.records.layout import Layout
from trireme_shared.protocol.records.step import LaneZero
from trireme_shared.protocol.wire.messages import Verdict
from trireme_shared.serving.core.table.rows import TableRows
from trireme_shared.tables.memory import Floats, Numbers
from trireme_shared.tables.table import joined, living

TURN_S = 0.002  # of a step, before the event loop has its turn
KEPT_S = 0.01  # between two looks whether a snapshot is written far enough
LOOK_S = 0.1  # between two looks whether the trainer has other rows now


class ReplicaRows(TableRows):
    """Those of one trainer. `moved`: set after each step; who waits for one clears it."""

    def __init__(self, layout: Layout, version: int) -> None:
        super().__init__(layout, 1, version)
        self.moved = asyncio.Event()


def new_rows(layout: Layout, version: int) -> ReplicaRows:
    """Without any row yet."""
    return ReplicaRows(layout, version)


async def step_rows(rows: ReplicaRows, means: RowMeans, lane_zero: LaneZero | None) -> None:
    """In place: the next version. `lane_zero`: of the step, with the options of the optimizer's groups in it. Must not be cancelled."""
    verdict = rows.push(rows.version, 0, means.ids, means.gradients, int(means.has_data))
    assert verdict is Verdict.APPLIED, (verdict, rows)
    while not rows.kept.may_step(rows.snapshots, clock.monotonic()):  # noqa: ASYNC110  a thread writes
        await asyncio.sleep(KEPT_S)
    until = clock.monotonic() + TURN_S
    for _ in rows.steps(lane_zero):
        if clock.monotonic() >= until:
            await asyncio.sleep(0)
            until = clock.monotonic() + TURN_S
    for table in rows.tables:
        table.removed.forget(rows.version)  # there are no deltas
    rows.moved.set()


async def rows_at(own: Callable[[], ReplicaRows], version: int | None, ids: Sequence[Numbers]) -> list[Floats]:
    """Of each table float32 (n, dim), at `version` (None: the newest one), once it is there: after the step that makes it. `own()`: the trainer's rows.
    Raises Gone: it is not kept, or the trainer has other rows by then (the job went back)."""
    rows = own()
    while (verdict := rows.judge(version)) is Verdict.TOO_EARLY:
        rows.moved.clear()
        await event_within(rows.moved, LOOK_S)
        if own() is not rows:
            raise Gone(f"the job went back while version {version} of its rows was waited for: join again")
    if verdict is not None:
        raise Gone(f"the tables are at version {rows.version}, {version} was asked: join again")
    found = []
    for table, some in zip(rows.tables, ids, strict=True):
        found.append(np.empty((len(some), table.spec.dim), np.float32))
        table.lookup(some, found[-1], version)
    return found


def whole_table(rows: TableRows, number: int, version: int | None) -> tuple[Numbers, Floats]:
    """int64 (n,), ascending, and float32 (n, dim); copies, without expired rows. Raises Gone: there is a newer version."""
    if rows.changing or version not in (None, rows.version):
        raise Gone(
            f"the tables are at version {rows.version}, {version} was asked: whole tables are read at the newest"
        )
    if number >= len(rows.tables):
        raise InvalidArgument(f"table {number} was asked for: the model has {len(rows.tables)}")
    table = rows.tables[number]
    found = living(joined([table.read_slot(slot) for slot in table.slots()], table.width), table.spec, table.version)
    return found.ids, np.ascontiguousarray(found.content[:, : table.spec.dim])


def put_start_rows(rows: TableRows, layout: Layout, init_from: str | None, states: bool) -> None:
    """Rows that the tables start with (`init_from`): each trainer that has version 0 reads all of them itself, in place. Blocks. `states`: with the
    state of their optimizers. Raises InvalidArgument: the files were changed since this trainer made its model; OSError."""
    fit, mark = fit_tables(layout.tables, init_from or "", states=states), mark_in(layout.initial)
    if (here := fit.mark()) != mark:
        msg = f"the tables beside {init_from} were changed while the job began (mark {here or 'none'}, it was {mark})"
        raise InvalidArgument(msg, hint="start a new job for new files", fatal=True)
    tables = {table.spec.name: table for table in rows.tables}
    for start in fit.tables:
        put_rows(tables[start.name], start)

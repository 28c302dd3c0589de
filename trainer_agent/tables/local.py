"""Tables in this process, for training with one lane and without any service.

lookup at version v ──► forward, backward ──► lane_rows ──step──► version v + 1
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer_agent.tables.files import StoredTable
from trireme_shared.checkpoints.start_tables import StartTable, put_rows
from trireme_shared.protocol.records.layout import TableSpec
from trireme_shared.tables.grouping import Numbers
from trireme_shared.tables.lanes import LaneRows, mean_over_lanes
from trireme_shared.tables.memory import Floats
from trireme_shared.tables.sharded import ShardedTable
from trireme_shared.tables.table import Table, joined, living


class LocalTables:
    """A RowSource that steps. `slot_count`: of the job: limits of tables (max_rows, admit_after) are counted
    by slots."""

    def __init__(self, specs: Sequence[TableSpec], slot_count: int) -> None:
        self._tables = [ShardedTable(spec, slot_count) for spec in specs]

    def __repr__(self) -> str:
        return f"<LocalTables {', '.join(map(repr, self._tables))}>"

    def lookup(self, table: int, ids: Numbers) -> Floats:
        one = self._tables[table]
        found = np.empty((len(ids), one.spec.dim), np.float32)
        one.lookup(ids, found)
        return found

    async def rows(self, ids: Sequence[Numbers]) -> list[Floats]:
        """Of all tables at once, as a trainer asks parameter servers."""
        return [self.lookup(table, some) for table, some in enumerate(ids)]

    def step(self, lane: Sequence[LaneRows] | None, factor: float = 1.0) -> None:
        """All tables, by the rows of the only lane. None: its minibatch is left out; rows stay, and time goes
        on for them. `factor`: see RowOptimizer.rate."""
        for place, table in enumerate(self._tables):
            if lane is None:
                table.step(np.empty(0, np.int64), None)
            else:
                table.step(*mean_over_lanes([lane[place]], table.spec.dim), table.spec.optimizer.rate(factor))

    def start_with(self, starts: Sequence[StartTable]) -> None:
        """Rows of some of the tables, before the first step. Raises InvalidArgument, OSError."""
        found = {table.spec.name: table for table in self._tables}
        for start in starts:
            put_rows(found[start.name], start)

    def stored(self) -> tuple[StoredTable, ...]:
        """Copies of all rows."""
        return tuple(_stored(table) for table in self._tables)


def _stored(table: Table) -> StoredTable:
    rows = joined([table.read_slot(slot) for slot in table.slots()], table.width)
    rows = living(rows, table.spec, table.version)
    return StoredTable(
        table.spec, table.version, rows.ids, np.ascontiguousarray(rows.content[:, : table.spec.dim])
    )

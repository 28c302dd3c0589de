"""Rows that the tables of a collective job start with (`init_from`): each trainer that has version 0 reads all of them itself."""

from __future__ import annotations

from shared.checkpoints.start_tables import fit_tables, mark_in, put_rows
from shared.errors import InvalidArgument
from shared.records.layout import Layout
from shared.serving.core.table.rows import TableRows


def put_start_rows(rows: TableRows, layout: Layout, init_from: str | None, states: bool) -> None:
    """In place. Blocks. `states`: with the state of their optimizers. Raises InvalidArgument: the files were changed since this trainer made its model; OSError."""
    fit, mark = fit_tables(layout.tables, init_from or "", states=states), mark_in(layout.initial)
    if (here := fit.mark()) != mark:
        msg = f"the tables beside {init_from} were changed while the job began (mark {here or 'none'}, it was {mark})"
        raise InvalidArgument(msg, hint="start a new job for new files", fatal=True)
    tables = {table.spec.name: table for table in rows.tables}
    for start in fit.tables:
        put_rows(tables[start.name], start)

"""The tables of a model, if it has any: numba is loaded for those alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.errors import InvalidArgument
from shared.records import Mode
from shared.wire.messages import InitHeader

if TYPE_CHECKING:
    from pserver_service.core.table.rows import TableRows


def rows_of(header: InitHeader) -> TableRows | None:
    """None: the model has no tables. Raises InvalidArgument."""
    tables = header.layout.tables
    if tables and header.mode is Mode.ASYNC:
        msg = f"the model has {len(tables)} embedding tables, which asynchronous jobs cannot have yet"
        raise InvalidArgument(msg, hint="use mode sync")
    if not tables:
        return None
    from pserver_service.core.table.rows import TableRows  # noqa: PLC0415

    return TableRows(header.layout, header.lanes, header.record.version)

"""The tables of a model, if it has any: numba is loaded for those alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.records import Mode
from shared.wire.messages import InitHeader

if TYPE_CHECKING:
    from shared.serving.core.table.rows import TableRows


def rows_of(header: InitHeader) -> TableRows | None:
    """None: the model has no tables. Raises InvalidArgument."""
    if not header.layout.tables:
        return None
    from shared.serving.core.table.rows import TableRows  # noqa: PLC0415

    version = (
        header.record.version if header.mode is Mode.SYNC else 0
    )  # that of an asynchronous checkpoint is its number
    return TableRows(header.layout, header.lanes, version)

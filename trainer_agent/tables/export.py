"""The tables of a job beside its exported model: from the parameter servers into files, one table at a time."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from trainer_agent.tables.files import StoredTable, write_tables
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.records.layout import TableSpec
from trireme_shared.tables.hashing import Ids
from trireme_shared.tables.payload import Rows

MOST_BYTES = 2 << 30  # of ids and values of one table: the trainer has up to three times as much while it writes them

log = telemetry.logger("tables.export")


class TableReader(Protocol):
    """Rows of the embedding tables, see RowReader in trainer_agent/data_plane/step_exchange.py."""

    async def count_rows(self, table: int, version: int | None) -> int: ...

    async def whole_table(self, table: int, version: int | None) -> tuple[Ids, Rows]: ...


async def export_tables(
    reader: TableReader,
    specs: Sequence[TableSpec],
    version: int | None,
    directory: str,
    offload: Callable[..., Awaitable[dict[str, str]]],
    most_bytes: int | None = None,
) -> dict[str, str]:
    """As write_tables. `version` None: of an asynchronous job, whose rows have none; the files say 0. A table of more than `most_bytes` (None: MOST_BYTES) is left out, and the job's output says so. Raises OSError, Gone."""
    urls: dict[str, str] = {}
    limit = MOST_BYTES if most_bytes is None else most_bytes
    for number, spec in enumerate(specs):
        rows = await reader.count_rows(number, version)
        size = rows * (8 + 4 * spec.dim)
        if size > limit:
            left_out(spec, f"its {rows} rows are {size} bytes, and a trainer writes at most {limit}")
            continue
        ids, values = await reader.whole_table(number, version)
        urls |= await offload(write_tables, [StoredTable(spec, version or 0, ids, values)], directory)
    return urls


def left_out(spec: TableSpec, cause: str) -> None:
    """Say that it is in no export."""
    message = f"table {spec.name} is not in the export: {cause}; `trireme export` writes it from a checkpoint"
    log.warning("table_not_exported", table=spec.name, cause=cause)
    print(message, file=sys.stderr)  # noqa: T201  appears among what the script prints

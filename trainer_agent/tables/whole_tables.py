"""Whole tables of a job, one at a time: from whoever has the rows beside its exported model, and from a
committed checkpoint.

    export_tables             parameter servers, or the own rows ─► files
    read_tables               a checkpoint ─► memory, for evaluations while the job trains
    write_checkpoint_tables   a checkpoint ─► files

What reads a checkpoint blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from trainer_agent.tables.files import StoredTable, TableDelta, in_order, write_tables
from trireme_shared.checkpoints.tables import read_changes, read_rows
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import TooLarge
from trireme_shared.protocol.records.checkpoints import CheckpointRef, Manifest
from trireme_shared.protocol.records.layout import TableSpec
from trireme_shared.tables.hashing import Ids
from trireme_shared.tables.payload import Rows

if TYPE_CHECKING:
    from trireme_shared.tables.table import RowsOfIds  # loads numba


# of ids and values of one table: the trainer has up to three times as much while it writes them
MOST_BYTES = 2 << 30
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
    """As write_tables. `version` None: of an asynchronous job, whose rows have none; the files say 0. A table
    of more than `most_bytes` (None: MOST_BYTES) is left out, and the job's output says so. Raises OSError,
    Gone."""
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


def read_table(
    storage_url: str,
    ref: CheckpointRef,
    manifest: Manifest,
    spec: TableSpec,
    most_bytes: int | None = None,
    *,
    state: bool = False,
    reads: Callable[[], None] = lambda: None,
) -> StoredTable:
    """Ids and values, with `state` also that of the optimizer; all parts are read, and up to twice the bytes
    of ids and values are in memory. Raises CheckpointUnusable, OSError; TooLarge: these are more than
    `most_bytes`. `reads` is called for each piece."""
    ids, values, size, width = [], [], 0, spec.row_words if state else spec.dim

    def take(rows: RowsOfIds) -> None:
        nonlocal size
        reads()
        size += len(rows) * (8 + 4 * width)
        if most_bytes is not None and size > most_bytes:
            msg = (
                f"table {spec.name} has more than {most_bytes} bytes of ids and values in checkpoint "
                f"{ref.uuid} (step {ref.step})"
            )
            raise TooLarge(msg, hint=f"a trainer reads at most {most_bytes}; leave evaluate_every out")
        ids.append(rows.ids)
        values.append(rows.content[:, :width].copy())

    updates = read_rows(storage_url, ref, manifest, spec, take)
    found, content = in_order(ids, values, width)
    if not state:
        return StoredTable(spec, manifest.step, found, content)
    rows, states = (np.ascontiguousarray(some) for some in np.split(content, [spec.dim], 1))
    return StoredTable(spec, manifest.step, found, rows, states, updates)


def read_delta(
    storage_url: str, ref: CheckpointRef, manifest: Manifest, spec: TableSpec, since: tuple[str, int]
) -> TableDelta | None:
    """What changed since a checkpoint (uuid, step) that the parts of this one build on; of the files only
    these are read. None: they do not. Raises as read_table."""
    ids, values, gone = [], [], [np.empty(0, np.int64)]

    def take(rows: RowsOfIds) -> None:
        ids.append(rows.ids)
        values.append(rows.content[:, : spec.dim].copy())

    if not read_changes(storage_url, ref, manifest, spec, since[0], take, gone.append):
        return None
    rows = StoredTable(spec, manifest.step, *in_order(ids, values, spec.dim))
    return TableDelta(since[1], rows, np.setdiff1d(np.concatenate(gone), rows.ids))


def read_tables(
    storage_url: str, ref: CheckpointRef, manifest: Manifest, reads: Callable[[], None] = lambda: None
) -> list[StoredTable]:
    """All of them, in the layout's order, for lookups in this process. Raises as read_table."""
    return [
        read_table(storage_url, ref, manifest, spec, MOST_BYTES, reads=reads)
        for spec in manifest.layout.tables
    ]


def write_checkpoint_tables(
    storage_url: str, ref: CheckpointRef, manifest: Manifest, directory: str
) -> dict[str, str]:
    """As write_tables, one table after the other; what is too large is left out, and the job's output says
    so. Raises CheckpointUnusable, OSError."""
    urls: dict[str, str] = {}
    for spec in manifest.layout.tables:
        try:
            urls |= write_tables([read_table(storage_url, ref, manifest, spec, MOST_BYTES)], directory)
        except TooLarge as error:
            left_out(spec, error.message)
    return urls

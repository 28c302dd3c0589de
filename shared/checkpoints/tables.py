"""Embedding tables in the parts of checkpoints.

table.<name>.<first slot>   int64 (n, words): the rows of some slots, see shared.tables.snapshot.to_records
table.<name>.sketch         int64 (slots, words): counts of ids without a row, of tables with admit_after
metadata `tables`           JSON: updates of each table
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shared.blocks.snapshot import Snapshot
from shared.checkpoints import stored
from shared.errors import BadFrame, InvalidArgument
from shared.records.checkpoints import CheckpointRef
from shared.storage.tensor_file import Entry

if TYPE_CHECKING:
    from shared.tables.snapshot import SlotGroup, TableSnapshot  # loads numba

Records = npt.NDArray[np.int64]

METADATA = "tables"
PREFIX = "table."


def metadata_of(snapshot: Snapshot) -> dict[str, str]:
    """Of the part."""
    found = {table.spec.name: table.updates for table in _tables(snapshot)}
    return {METADATA: json.dumps(found)} if found else {}


def tensors_of(snapshot: Snapshot, *, finite: bool) -> Iterator[tuple[Entry, Callable[[], memoryview]]]:
    """To be written in this order. `finite`: rows that are not raise InvalidArgument then."""
    tables = _tables(snapshot)
    if not tables:
        return
    from shared.tables.snapshot import record_words, to_records  # noqa: PLC0415  only where there are tables: it loads numba

    def rows(table: TableSnapshot, group: SlotGroup) -> memoryview:
        found = table.read(group)
        if finite and not np.isfinite(found.content[:, : table.spec.dim]).all():
            msg = f"rows of table {table.spec.name} are NaN or infinite"
            hint = "go back to the checkpoint before, with a lower learning rate; on_nonfinite = ignore saves such rows"
            raise InvalidArgument(msg, hint=hint)
        return to_records(found).data.cast("B")

    for table in tables:
        for group in table.groups():
            entry = Entry(f"{PREFIX}{table.spec.name}.{group.first}", "int64", (group.rows, record_words(table.width)))
            yield entry, lambda table=table, group=group: rows(table, group)  # type: ignore[misc]
        if (sketch := table.sketch) is not None:
            counts = sketch.view(np.int64)
            yield Entry(f"{PREFIX}{table.spec.name}.sketch", "int64", counts.shape), lambda c=counts: c.data.cast("B")  # type: ignore[misc]


def records_for(entry: Entry, words: int | None, ref: CheckpointRef) -> Records:
    """Memory for a tensor of rows, int64 (n, words). Raises CheckpointUnusable: it has another form; `words` None: no table has it."""
    if words is None or entry.dtype != "int64" or len(entry.shape) != 2 or entry.shape[1] != words:
        stored.unusable(ref, f"{entry.name} is {entry.dtype} {entry.shape}: the job's tables are others")
    return np.empty(entry.shape, np.int64)


def updates_in(metadata: Mapping[str, str]) -> dict[str, int]:
    """Of each table. Raises BadFrame."""
    try:
        return {str(name): int(updates) for name, updates in json.loads(metadata.get(METADATA, "{}")).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise BadFrame(f"the part does not tell of its tables: {error!r}") from error


def table_in(name: str) -> tuple[str, str] | None:
    """Of a tensor's name: that of the table, and what of it; None: it is of no table."""
    if not name.startswith(PREFIX):
        return None
    table, _, part = name.removeprefix(PREFIX).rpartition(".")
    return table, part


def _tables(snapshot: Snapshot) -> Sequence[TableSnapshot]:
    return snapshot.tables  # type: ignore[return-value]

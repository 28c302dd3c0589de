"""Embedding tables in the parts of checkpoints.

table.<name>.<first slot>   int64 (n, words): the rows of some slots, see trireme_shared.tables.saving.snapshot.to_records
table.<name>.sketch         int64 (n, 1 + words): slots, and their counts of ids without a row, of tables with admit_after
metadata `tables`           JSON: updates of each table

A delta has the rows and slots of sketches that changed since the part before it in its chain (CheckpointPart.chain), and

table.<name>.removed        int64 (n,): ids whose rows left since then; some may have come back
table.<name>.expired        int64 (n,): ids whose rows expired since then and are still in memory
metadata `since`            JSON: the version of each table in the part before
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trireme_shared.blocks.snapshot import Snapshot
from trireme_shared.checkpoints import stored
from trireme_shared.platform.storage.tensor_file import Entry, Made
from trireme_shared.protocol.errors import BadFrame, InvalidArgument
from trireme_shared.protocol.records.checkpoints import CheckpointRef

if TYPE_CHECKING:
    from trireme_shared.tables.saving.snapshot import SlotGroup, TableSnapshot  # loads numba

Records = npt.NDArray[np.int64]

METADATA, SINCE = "tables", "since"
PREFIX = "table."
REMOVED, EXPIRED = "removed", "expired"


def metadata_of(snapshot: Snapshot) -> dict[str, str]:
    """Of the part."""
    tables = tables_of(snapshot)
    if not tables:
        return {}
    found = {METADATA: json.dumps({table.spec.name: table.updates for table in tables})}
    since = {table.spec.name: table.changes.since for table in tables if table.changes is not None}
    return found | ({SINCE: json.dumps(since)} if since else {})


def tensors_of(snapshot: Snapshot, *, finite: bool) -> Iterator[tuple[Entry, memoryview | Made]]:
    """To be written in this order. `finite`: rows that are not raise InvalidArgument then."""
    tables = tables_of(snapshot)
    if not tables:
        return
    from trireme_shared.tables.saving.snapshot import record_words  # noqa: PLC0415  only where there are tables: it loads numba

    def rows(table: TableSnapshot, group: SlotGroup, place: memoryview | None) -> memoryview:
        records, are_finite = table.records(group, place)
        if finite and not are_finite:
            msg = f"rows of table {table.spec.name} are NaN or infinite"
            hint = "go back to the checkpoint before, with a lower learning rate; on_nonfinite = ignore saves such rows"
            raise InvalidArgument(msg, hint=hint)
        return records.data.cast("B")

    for table in tables:
        for group in table.groups():
            entry = Entry(f"{PREFIX}{table.spec.name}.{group.first}", "int64", (group.rows, record_words(table.width)))
            yield entry, lambda place, table=table, group=group: rows(table, group, place)  # type: ignore[misc]
        rest = {"sketch": table.sketch_rows()}
        if table.changes is not None:
            rest |= {REMOVED: table.changes.removed, EXPIRED: table.changes.expired}
        for what, array in rest.items():
            if len(array):  # an empty tensor is no memory to write
                entry = Entry(f"{PREFIX}{table.spec.name}.{what}", "int64", array.shape)
                yield entry, array.data.cast("B")


def records_for(entry: Entry, words: int | None, ref: CheckpointRef) -> Records:
    """Memory for a tensor of rows, int64 (n, words). Raises CheckpointUnusable: it has another form; `words` None: no table has it."""
    if words is None or entry.dtype != "int64" or len(entry.shape) != 2 or entry.shape[1] != words:
        stored.unusable(ref, f"{entry.name} is {entry.dtype} {entry.shape}: the job's tables are others")
    return np.empty(entry.shape, np.int64)


def ids_for(entry: Entry, ref: CheckpointRef) -> Records:
    """Memory for a tensor of ids, int64 (n,). Raises CheckpointUnusable."""
    if entry.dtype != "int64" or len(entry.shape) != 1:
        stored.unusable(ref, f"{entry.name} is {entry.dtype} {entry.shape}: ids were expected")
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


def tables_of(snapshot: Snapshot) -> Sequence[TableSnapshot]:
    return snapshot.tables  # type: ignore[return-value]

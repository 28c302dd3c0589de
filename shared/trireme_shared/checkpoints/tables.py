"""Embedding tables in the parts of checkpoints: what a part holds of them, and their rows read back, some
slots at a time.

table.<name>.<first slot>   int64 (n, words): the rows of some slots, see
                            trireme_shared.tables.snapshot.to_records
table.<name>.sketch         int64 (n, 1 + words): slots, and their counts of ids without a row, of tables with
                            admit_after
metadata `tables`           JSON: updates of each table

A delta has the rows and slots of sketches that changed since the part before it in its chain
(CheckpointPart.chain), and

table.<name>.removed        int64 (n,): ids whose rows left since then; some may have come back
table.<name>.expired        int64 (n,): ids whose rows expired since then and are still in memory
metadata `since`            JSON: the version of each table in the part before

parts, newest of each chain first ──► rows of some slots ──► take(rows) ...
    ──checksums are right──► what was taken may be used
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trireme_shared.blocks.snapshot import Snapshot
from trireme_shared.checkpoints import stored
from trireme_shared.platform.storage.tensor_file import Entry, Made
from trireme_shared.protocol.errors import BadFrame, InvalidArgument
from trireme_shared.protocol.records.checkpoints import CheckpointPart, CheckpointRef, Manifest
from trireme_shared.protocol.records.layout import TableSpec

if TYPE_CHECKING:
    from trireme_shared.tables.hashing import Ids
    from trireme_shared.tables.snapshot import SlotGroup, TableSnapshot  # loads numba
    from trireme_shared.tables.table import RowsOfIds  # loads numba

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
    # only where there are tables: it loads numba
    from trireme_shared.tables.snapshot import record_words  # noqa: PLC0415

    def rows(table: TableSnapshot, group: SlotGroup, place: memoryview | None) -> memoryview:
        records, are_finite = table.records(group, place)
        if finite and not are_finite:
            msg = f"rows of table {table.spec.name} are NaN or infinite"
            hint = (
                "go back to the checkpoint before, with a lower learning rate; on_nonfinite = ignore "
                "saves such rows"
            )
            raise InvalidArgument(msg, hint=hint)
        return records.data.cast("B")

    for table in tables:
        for group in table.groups():
            entry = Entry(
                f"{PREFIX}{table.spec.name}.{group.first}", "int64", (group.rows, record_words(table.width))
            )
            yield entry, lambda place, table=table, group=group: rows(table, group, place)  # type: ignore[misc]
        rest = {"sketch": table.sketch_rows()}
        if table.changes is not None:
            rest |= {REMOVED: table.changes.removed, EXPIRED: table.changes.expired}
        for what, array in rest.items():
            if len(array):  # an empty tensor is no memory to write
                entry = Entry(f"{PREFIX}{table.spec.name}.{what}", "int64", array.shape)
                yield entry, array.data.cast("B")


def check_form(entry: Entry, words: int | None, ref: CheckpointRef, *, ids: bool) -> None:
    """Of a tensor of rows, int64 (n, words), or of `ids`, int64 (n,). Raises CheckpointUnusable: it has
    another form; `words` None: no table has it."""
    form = () if ids else (words,)
    if words is None or entry.dtype != "int64" or entry.shape[1:] != form or not entry.shape:
        why = "ids were expected" if ids and words is not None else "the job's tables are others"
        stored.unusable(ref, f"{entry.name} is {entry.dtype} {entry.shape}: {why}")


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


Take = Callable[["RowsOfIds"], None]


def read_rows(storage_url: str, ref: CheckpointRef, manifest: Manifest, spec: TableSpec, take: Take) -> int:
    """Each row of the table once, expired ones not; how many updates the table has had (asynchronous: at the
    parameter server with the most). Reads all parts and what they build on. Raises CheckpointUnusable: what
    was taken must not be used; OSError: the storage failed."""
    updates = 0
    for part in manifest.parts:
        mine = _read_chain(storage_url, ref, manifest, spec, part, len(part.chain), take, lambda _: None)
        updates = max(updates, mine)
    return updates


def read_changes(
    storage_url: str,
    ref: CheckpointRef,
    manifest: Manifest,
    spec: TableSpec,
    since: str,
    take: Take,
    gone: Callable[[Ids], None],
) -> bool:
    """The rows that changed since checkpoint `since`, each once, and the ids that have no row any more (they
    may have had none then; some are rows that came back); only deltas are read. False: the parts do not build
    on that checkpoint; nothing was taken. Raises as read_rows."""
    counts = [_links_after(part, since) for part in manifest.parts]
    if None in counts:
        return False
    for part, links in zip(manifest.parts, counts, strict=True):
        _read_chain(storage_url, ref, manifest, spec, part, links or 0, take, gone)
    return True


def _links_after(part: CheckpointPart, since: str) -> int | None:
    """How many parts lie between it and that of checkpoint `since`; None: it does not build on that."""
    uuids = [link.uuid for link in part.chain]
    return len(uuids) - 1 - uuids.index(since) if since in uuids else None


def _read_chain(
    storage_url: str,
    ref: CheckpointRef,
    manifest: Manifest,
    spec: TableSpec,
    part: CheckpointPart,
    links: int,
    take: Take,
    gone: Callable[[Ids], None],
) -> int:
    """A part and the last `links` parts that it builds on. `gone`: called with ids that have no row any
    more."""
    # only where there are tables: it loads numba
    from trireme_shared.tables.snapshot import Chain, from_records, record_words  # noqa: PLC0415
    from trireme_shared.tables.table import living  # noqa: PLC0415

    words, chain = record_words(spec.row_words), Chain()
    version = manifest.step if part.rows_version is None else part.rows_version
    waiting: list[tuple[str, Records]] = []

    def place(entry: Entry) -> memoryview | None:
        pass_on()
        named = table_in(entry.name)
        if named is None or named[0] != spec.name or named[1] == "sketch":
            return None
        check_form(entry, words, ref, ids=named[1] in (REMOVED, EXPIRED))
        waiting.append((named[1], np.empty(entry.shape, np.int64)))
        return waiting[0][1].data.cast("B")

    def pass_on() -> None:
        """The tensor before is read by now."""
        while waiting:
            what, records = waiting.pop()
            if what in (REMOVED, EXPIRED):
                gone(chain.gone(records))
            else:
                rows = chain.rows(from_records(records, spec.row_words))
                alive = living(rows, spec, version)
                take(alive)
                if len(alive) < len(rows):
                    gone(np.setdiff1d(rows.ids, alive.ids))

    found = stored.read_part(storage_url, ref, part, place)
    pass_on()
    for link in reversed(part.chain[len(part.chain) - links :]):
        chain.next_older()
        stored.read_part(storage_url, ref, link, place)
        pass_on()
    try:
        return updates_in(found.metadata)[spec.name]
    except (BadFrame, KeyError) as error:
        stored.unusable(ref, f"{part.file} lacks table {spec.name}: the job's tables are others", error)

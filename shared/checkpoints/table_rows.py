"""The rows of an embedding table in a committed checkpoint, some slots at a time. Everything blocks.

parts ──► rows of some slots ──► take(rows) ...   ──checksums are right──► what was taken may be used
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shared.checkpoints import stored
from shared.checkpoints.tables import Records, records_for, table_in, updates_in
from shared.errors import BadFrame
from shared.records.checkpoints import CheckpointRef, Manifest
from shared.records.layout import TableSpec
from shared.storage.tensor_file import Entry

if TYPE_CHECKING:
    from shared.tables.table import RowsOfIds  # loads numba


def read_rows(
    storage_url: str, ref: CheckpointRef, manifest: Manifest, spec: TableSpec, take: Callable[[RowsOfIds], None]
) -> int:
    """Each row of the table once, expired ones not; how many updates the table has had (asynchronous: at the parameter server with the most). Reads all parts. Raises CheckpointUnusable: what was
    taken must not be used; OSError: the storage failed."""
    from shared.tables.snapshot import from_records, record_words  # noqa: PLC0415  only where there are tables: it loads numba
    from shared.tables.table import living  # noqa: PLC0415

    words, updates, version = record_words(spec.row_words), 0, manifest.step
    waiting: list[Records] = []

    def place(entry: Entry) -> memoryview | None:
        pass_on()
        named = table_in(entry.name)
        if named is None or named[0] != spec.name or named[1] == "sketch":
            return None
        waiting.append(records_for(entry, words, ref))
        return waiting[0].data.cast("B")

    def pass_on() -> None:
        """The tensor before is read by now."""
        while waiting:
            take(living(from_records(waiting.pop(), spec.row_words), spec, version))

    for part in manifest.parts:
        version = manifest.step if part.rows_version is None else part.rows_version
        found = stored.read_part(storage_url, ref, part, place)
        pass_on()
        try:
            updates = max(updates, updates_in(found.metadata)[spec.name])
        except (BadFrame, KeyError) as error:
            stored.unusable(ref, f"{part.file} lacks table {spec.name}: the job's tables are others", error)
    return updates

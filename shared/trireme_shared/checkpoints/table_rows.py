"""The rows of an embedding table in a committed checkpoint, some slots at a time. Everything blocks.

parts, newest of each chain first ──► rows of some slots ──► take(rows) ...   ──checksums are right──► what was taken may be used
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from trireme_shared.checkpoints import stored
from trireme_shared.checkpoints.tables import EXPIRED, REMOVED, Records, ids_for, records_for, table_in, updates_in
from trireme_shared.platform.storage.tensor_file import Entry
from trireme_shared.protocol.errors import BadFrame
from trireme_shared.protocol.records.checkpoints import CheckpointPart, CheckpointRef, Manifest
from trireme_shared.protocol.records.layout import TableSpec

if TYPE_CHECKING:
    from trireme_shared.tables.hashing import Ids
    from trireme_shared.tables.table import RowsOfIds  # loads numba

Take = Callable[["RowsOfIds"], None]


def read_rows(storage_url: str, ref: CheckpointRef, manifest: Manifest, spec: TableSpec, take: Take) -> int:
    """Each row of the table once, expired ones not; how many updates the table has had (asynchronous: at the parameter server with the most). Reads
    all parts and what they build on. Raises CheckpointUnusable: what was taken must not be used; OSError: the storage failed."""
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
    """The rows that changed since checkpoint `since`, each once, and the ids that have no row any more (they may have had none then; some are rows that came
    back); only deltas are read. False: the parts do not build on that checkpoint; nothing was taken. Raises as read_rows."""
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
    """A part and the last `links` parts that it builds on. `gone`: called with ids that have no row any more."""
    from trireme_shared.tables.saving.chain import Chain  # noqa: PLC0415  only where there are tables: it loads numba
    from trireme_shared.tables.saving.snapshot import from_records, record_words  # noqa: PLC0415
    from trireme_shared.tables.table import living  # noqa: PLC0415

    words, chain = record_words(spec.row_words), Chain()
    version = manifest.step if part.rows_version is None else part.rows_version
    waiting: list[tuple[str, Records]] = []

    def place(entry: Entry) -> memoryview | None:
        pass_on()
        named = table_in(entry.name)
        if named is None or named[0] != spec.name or named[1] == "sketch":
            return None
        is_ids = named[1] in (REMOVED, EXPIRED)
        waiting.append((named[1], ids_for(entry, ref) if is_ids else records_for(entry, words, ref)))
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

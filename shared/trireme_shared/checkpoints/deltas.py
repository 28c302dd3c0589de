"""Whether a part is a delta: rows that changed since an earlier part of the same owner, instead of all rows.

own part in the latest checkpoint --chain--> DeltaBase --narrow(snapshot)--> True: a delta is written; False: a whole part

Parameters are in every part as a whole, so a part of which they are the larger half is always whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trireme_shared.blocks.snapshot import Snapshot
from trireme_shared.checkpoints.tables import tables_of
from trireme_shared.protocol.records.checkpoints import PartLink

MOST_SHARE = (
    0.5  # of the bytes of the whole part that the chain begins with: a larger delta is not worth its place in the chain
)


@dataclass(frozen=True, slots=True)
class DeltaBase:
    """What a delta builds on. `chain`: the whole part first. `versions`: of each table in the last part of it."""

    chain: tuple[PartLink, ...]
    versions: Mapping[str, int]


def narrow(snapshot: Snapshot, base: DeltaBase) -> bool:
    """Leave to the tables of a snapshot what changed since `base`; False: the snapshot stays as it is, since that would be too much, or is not known.
    Blocks: 50 ms a million rows."""
    size = sum(saved.buffer.view.nbytes for saved in snapshot.tensors.values())
    found = []
    for table in tables_of(snapshot):
        changes = table.changes_since(base.versions[table.spec.name])
        if changes is None:
            return False
        size += changes.bytes
        found.append((table, changes))
    if not found or size > MOST_SHARE * base.chain[0].bytes:
        return False
    for table, changes in found:
        table.narrow(changes)
    return True

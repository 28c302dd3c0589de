"""Which of its own parts this parameter server may build a delta on: that of the latest checkpoint, if nothing came in between.

part written -> remembered -> its checkpoint is the latest one -> the next part may be a delta on it
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from trireme_shared.blocks.snapshot import Snapshot
from trireme_shared.checkpoints.tables import tables_of
from trireme_shared.checkpoints.writer import DeltaBase
from trireme_shared.protocol.records import SlotMap
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointPart
from trireme_shared.serving.core.store import Store


@dataclass(frozen=True, slots=True)
class _Written:
    part: CheckpointPart
    store: str
    slots: SlotMap
    versions: Mapping[str, int]


def versions_of(snapshot: Snapshot) -> dict[str, int]:
    """Of its tables."""
    return {table.spec.name: table.version for table in tables_of(snapshot)}


class Chains:
    """The parts of this process, by the uuid of their checkpoint, since the latest one."""

    def __init__(self) -> None:
        self._written: dict[str, _Written] = {}

    def __repr__(self) -> str:
        return f"<Chains: {len(self._written)} parts to build on>"

    def has(self, uuid: str) -> bool:
        """Whether a part may build on that checkpoint."""
        return uuid in self._written

    def base(
        self, latest: CheckpointLatest | None, damaged: Collection[str], store: Store, slots: SlotMap, most: int
    ) -> DeltaBase | None:
        """For a part of `store` with these slots. `most`: deltas in a chain. None: it has to be whole. What nobody will build on is forgotten."""
        own = self._written.get(latest.uuid) if latest is not None else None
        if own is None or store.rows is None:
            return None
        self._written = {uuid: each for uuid, each in self._written.items() if each.part.step >= own.part.step}
        store.rows.forget_removed(own.versions)
        chain = (*own.part.chain, own.part.link(latest.uuid if latest is not None else ""))
        same = (own.store, own.slots) == (store.name, slots)
        if not same or len(chain) > most or any(link.uuid in damaged for link in chain):
            return None
        return DeltaBase(chain, own.versions)

    def add(self, uuid: str, part: CheckpointPart, store: Store, slots: SlotMap, versions: Mapping[str, int]) -> None:
        """A part that is written."""
        if versions:
            self._written[uuid] = _Written(part, store.name, slots, versions)

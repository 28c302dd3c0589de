"""What a parameter server copies for checkpoints: versions of its store, with ledger (asynchronous) and rows of embedding tables.

Of the tables a part has all rows, or those that changed since the own part of the latest checkpoint (chains.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pserver_service.checkpoints.chains import Chains, versions_of
from pserver_service.checkpoints.ledger_text import ledger_metadata
from pserver_service.context import PserverContext
from trireme_shared.blocks.snapshot import Snapshot
from trireme_shared.checkpoints.parts import Checkpointer, Copied, Copies
from trireme_shared.checkpoints.saving_context import Cut, SavingContext, read_cut
from trireme_shared.checkpoints.writer import narrow_to_changes
from trireme_shared.protocol.records import SlotMap
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointPart, PartLink
from trireme_shared.protocol.records.members import pserver_names
from trireme_shared.serving.core.asynchronous.saved_ledger import AsyncSnapshot
from trireme_shared.serving.core.store import Store


def saving_of(context: PserverContext) -> SavingContext:
    directory = context.directory
    return SavingContext(
        etcd=context.etcd,
        directory=directory,
        owner=context.pserver,
        own_key=context.own_index,
        offload=context.offload,
        living=lambda _: {index: pserver_names([index]) for index in directory.pservers},
        slots_of=lambda version: directory.slots if directory.slots and directory.slots.version == version else None,
    )


class StoreCopies(Copies):
    """With the `checkpointer` that writes them."""

    def __init__(self, context: PserverContext) -> None:
        super().__init__(context.pserver.snapshot_ready)
        self._context, self._pserver = context, context.pserver
        self._chains = Chains()
        self._store: Store | None = None  # of the copy that was taken last
        self._taken: _Taken | None = None
        self.checkpointer = Checkpointer(saving_of(context), self)

    @property
    def waits(self) -> bool:
        return self._pserver.store is not None and self._pserver.store.snapshot_waits

    def take(self) -> Copied | None:
        store = self._pserver.store
        snapshot = store.take_snapshot() if store is not None else None
        if store is None or snapshot is None:
            return None
        self._store = store
        return Copied(
            snapshot=snapshot,
            index=self._pserver.index,
            timeline=self._pserver.timeline,
            restored=self._pserver.checkpoint,
            slots=snapshot.slots,
            layout=store.layout,
            mode=store.mode,
            lanes=store.lanes,
            skipped=store.skipped,
        )

    def is_of(self, timeline: int) -> bool:
        return self._pserver.store is not None and self._pserver.timeline == timeline

    async def cut(self, uuid: str, copied: Copied) -> Cut | None:
        if not isinstance(copied.snapshot, AsyncSnapshot):
            return None
        return await read_cut(self._context.etcd, self._context.keys, uuid)

    def may_build_on(self, latest: CheckpointLatest | None) -> str:
        return latest.uuid if latest is not None and self._chains.has(latest.uuid) else ""

    async def chain(
        self, copied: Copied, slots: SlotMap, latest: CheckpointLatest | None, damaged: Collection[str]
    ) -> tuple[PartLink, ...]:
        snapshot, store = copied.snapshot, self._store
        assert store is not None
        self._taken = _Taken(store, slots, versions_of(snapshot))
        base = self._chains.base(latest, damaged, store, slots, self._context.spec.deltas_per_base)
        narrowed = base is not None and await self.checkpointer.offload(narrow_to_changes, snapshot, base)
        return base.chain if base is not None and narrowed else ()

    def metadata(self, snapshot: Snapshot) -> Mapping[str, str]:
        return ledger_metadata(snapshot)

    def written(self, uuid: str, part: CheckpointPart) -> None:
        taken, self._taken = self._taken, None
        assert taken is not None
        self._chains.add(uuid, part, taken.store, taken.slots, taken.versions)


@dataclass(frozen=True, slots=True)
class _Taken:
    """The copy whose part is being written."""

    store: Store
    slots: SlotMap
    versions: Mapping[str, int]

"""Which parameter server holds which blocks: layout and slot map -> pserver index -> block numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trireme_shared.protocol.records import SlotMap
from trireme_shared.protocol.records.assignments import slot_of
from trireme_shared.protocol.records.layout import Layout


@dataclass(frozen=True, slots=True)
class Routes:
    """`owners[block]`: pserver index. `blocks[index]`: in ascending order; if the model has embedding tables, of each parameter server that owns slots,
    maybe none. `slots[slot]`: pserver index. `version`: of the slot map."""

    version: int
    owners: tuple[int, ...]
    blocks: dict[int, tuple[int, ...]]
    slots: tuple[int, ...] = ()

    def split(self, blocks: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """Some blocks by pserver index."""
        found: dict[int, list[int]] = {}
        for block in blocks:
            found.setdefault(self.owners[block], []).append(block)
        return {index: tuple(found[index]) for index in sorted(found)}

    def changed_since(self, before: Routes) -> list[int]:
        """The parameter servers that have other slots by this map than by that one, without those that have none now."""
        pairs = zip(before.slots, self.slots, strict=True)
        changed = {index for was, now in pairs if was != now for index in (was, now)}
        return sorted(changed.intersection(self.slots))


def route(layout: Layout, slots: SlotMap) -> Routes:
    owners = tuple(slots.owners[slot_of(block.number, layout.slot_count)] for block in layout.blocks())
    routes = Routes(slots.version, owners, {}, slots.owners)
    if layout.tables:
        routes.blocks.update((index, ()) for index in sorted(set(slots.owners)))
    routes.blocks.update(routes.split(range(len(owners))))
    return routes

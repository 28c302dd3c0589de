"""Which parameter server holds which blocks: layout and slot map -> pserver index -> block numbers."""

from __future__ import annotations

from dataclasses import dataclass

from shared.records import SlotMap
from shared.records.layout import Layout
from shared.slots import slot_of


@dataclass(frozen=True, slots=True)
class Routes:
    """`owners[block]`: pserver index. `blocks[index]`: in ascending order. `version`: of the slot map."""

    version: int
    owners: tuple[int, ...]
    blocks: dict[int, tuple[int, ...]]


def route(layout: Layout, slots: SlotMap) -> Routes:
    owners = tuple(slots.owners[slot_of(block.number, layout.slot_count)] for block in layout.blocks())
    found: dict[int, list[int]] = {}
    for block, owner in enumerate(owners):
        found.setdefault(owner, []).append(block)
    return Routes(slots.version, owners, {index: tuple(found[index]) for index in sorted(found)})

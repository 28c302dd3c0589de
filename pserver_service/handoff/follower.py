"""A pserver follows the slot map: blocks that it lost are forgotten, blocks that it gained were handed over before.

memory is reserved, parts of a group arrive -> kept apart -> whole: HAVE -> the map gives the group to this pserver -> blocks of its store, served
                                                     `-> another migration was planned -> dropped

`follow` is called whenever the view of the job changes, before anybody else sees the change. The map and the migration that one
transaction wrote are seen together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing

from pserver_service.checkpoints import ledger_text
from pserver_service.context import PserverContext
from pserver_service.core.calls import Payload
from pserver_service.core.geometry import Geometry
from pserver_service.core.moving import ArrivingBlocks, adopt, forget
from pserver_service.core.saved_ledger import SavedLedger
from pserver_service.core.store import Store
from shared.blocks.buffers import BufferPool
from shared.errors import NotReady
from shared.records import JobState, Mode, SlotMap
from shared.records.assignments import Group, Migration
from shared.records.layout import Block, Layout
from shared.records.step import StepRecord
from shared.runtime import clock, telemetry
from shared.slots import blocks_in
from shared.wire.messages import HandoffAnswer, HandoffHeader, HandoffPart, InitHeader

REST_S = 0.02  # at most; a group has up to 32 pieces, and its source waits for 5 s

log = telemetry.logger("pserver.slots")


class SlotFollower:
    """Takes groups from other parameter servers, and keeps the store's blocks equal to what the slot map says."""

    def __init__(self, context: PserverContext) -> None:
        self._context, self._directory, self._pserver = context, context.directory, context.pserver
        self._arriving: dict[tuple[str, int], ArrivingBlocks] = {}
        self._pool: BufferPool | None = None  # of blocks that arrive before there is a store

    def __repr__(self) -> str:
        return f"<SlotFollower of pserver-{self._pserver.index}: {len(self._arriving)} groups arrive>"

    # ------------------------------------------------------------ the map

    def follow(self) -> None:
        """Bring the store in line with the slot map; drop what arrived for a migration that is over."""
        state, slots, store = self._directory.state, self._directory.slots, self._pserver.store
        if state is None or slots is None:
            return
        if store is not None and self._pserver.timeline == state.timeline:
            self._take_map(store, slots)
        elif store is None and self._arriving and self._has_joined(state):
            self._begin(state, slots)
        migration = self._directory.migration
        for key in [key for key in self._arriving if not _is_part_of(key, migration, state)]:
            self._arriving.pop(key).release()

    def _take_map(self, store: Store, slots: SlotMap) -> None:
        before, index = store.slots, self._pserver.index
        if before is None or before.version >= slots.version:
            store.slots = before or slots
            return
        count, mine = len(slots.owners), {slot for slot, owner in enumerate(slots.owners) if owner == index}
        had = {slot for slot, owner in enumerate(before.owners) if owner == index}
        lost = frozenset(blocks_in(had - mine, store.geometry.blocks, count))
        gained = frozenset(blocks_in(mine - had, store.geometry.blocks, count))
        store.slots = slots
        if lost:
            forget(store, lost)
            self._pserver.forgotten(lost)
        if gained:
            adopt(store, self._arrived(gained))
        if lost or gained:
            log.info("slots_moved", index=index, version=slots.version, lost=len(lost), gained=len(gained))

    def _begin(self, state: JobState, slots: SlotMap) -> None:
        """The first blocks of a parameter server that has joined by a resize."""
        index, layout, spec = self._pserver.index, self._directory.layout, self._context.spec
        mine = {slot for slot, owner in enumerate(slots.owners) if owner == index}
        if layout is None or not mine:
            return
        gained = frozenset(blocks_in(mine, Geometry(layout).blocks, len(slots.owners)))
        groups = self._arrived(gained)
        version = min((moved.version for group in groups for moved in group.blocks), default=0)
        records = {record.version: record for group in groups for record in group.history.records}
        header = InitHeader(
            job=self._pserver.job,
            generation=state.generation,
            mode=spec.mode,
            lanes=spec.lanes if spec.mode is Mode.SYNC else 1,
            layout=layout,
            pserver=index,
            record=records.get(version, StepRecord(version=version, positions=())),
        )
        store = Store(header, self._pserver.schedule, self._pool, self._pserver.clipping)
        store.seal()
        store.slots, self._pool = slots, None
        adopt(store, groups)
        self._pserver.restore(store, state.timeline, state.checkpoint)

    def _arrived(self, numbers: frozenset[int]) -> list[ArrivingBlocks]:
        """The groups that consist of these blocks. The leader gave them to this process because it has them."""
        found = {key: group for key, group in self._arriving.items() if group.whole and group.numbers <= numbers}
        there = frozenset(number for group in found.values() for number in group.numbers)
        assert there == numbers, f"blocks {sorted(numbers - there)[:4]} were given to {self!r}, which never got them"
        for key in found:
            del self._arriving[key]
        return list(found.values())

    # ------------------------------------------------------------ groups that arrive

    async def take(self, header: HandoffHeader, parts: AsyncIterator[tuple[HandoffPart, Payload]]) -> HandoffAnswer:
        """Some parts of a group; with the last ones it is whole. Nothing of it is served before the slot map says so.

        A repetition changes nothing. Raises NotReady: this pserver knows nothing of that migration, yet or any more; BadFrame.
        """
        self._pserver.check(header)
        key, places = (header.migration, header.group), self._places(header)
        arriving = self._arriving.get(key)
        if arriving is None:
            arriving = self._arriving[key] = ArrivingBlocks(places, self._memory())
        with closing(arriving.reserve(header.coming)) as reserving:
            began = clock.monotonic()
            for _ in reserving:
                await asyncio.sleep(rest_s(clock.monotonic() - began))
                began = clock.monotonic()
        async for part, payload in parts:
            self._check_expected(header, arriving)
            arriving.take(part, memoryview(payload))
            await asyncio.sleep(0)
        self._check_expected(header, arriving)
        if header.whole and not arriving.whole:
            ledger, _ = ledger_text.from_text(header.ledger) if header.ledger else (SavedLedger({}), ())
            arriving.complete(header.blocks, header.history, ledger)
            self._pserver.generation = max(self._pserver.generation, header.generation)
        return HandoffAnswer(have=arriving.whole)

    def _check_expected(self, header: HandoffHeader, arriving: ArrivingBlocks) -> None:
        if self._arriving.get((header.migration, header.group)) is not arriving:
            raise NotReady(f"migration {header.migration} is over at pserver-{self._pserver.index}")

    def _places(self, header: HandoffHeader) -> dict[int, Block]:
        """Blocks of the group. Raises NotReady."""
        group = self._expected(header)
        layout, slots = self._directory.layout, self._directory.slots
        if group is None or layout is None or slots is None:
            msg = f"group {header.group} of migration {header.migration} is not expected at pserver-{self._pserver.index} now"
            raise NotReady(msg)
        return places(layout, slots, group)

    def _expected(self, header: HandoffHeader) -> Group | None:
        migration, state, index = self._directory.migration, self._directory.state, self._pserver.index
        if migration is None or state is None or migration.id != header.migration:
            return None
        if not (migration.timeline == header.timeline == state.timeline):
            return None
        known = 0 <= header.group < len(migration.groups) and migration.groups[header.group].target == index
        mine = migration.members.get(str(index)) == self._pserver.incarnation
        group = migration.groups[header.group] if known and mine else None
        slots = self._directory.slots
        # already given to this process: a late repetition must not arrive a second time
        here = group is not None and slots is not None and slots.owners[group.slots[0]] == index
        return None if here else group

    def _memory(self) -> BufferPool:
        if self._pserver.store is not None:
            return self._pserver.store.pool
        self._pool = self._pool or self._pserver.new_pool()
        return self._pool

    def _has_joined(self, state: JobState) -> bool:
        return state.joined.get(str(self._pserver.index)) == self._pserver.incarnation


def rest_s(spent_s: float) -> float:
    """After a piece of work that nobody waits for: it shall take a quarter of a processor, and trainers the rest."""
    return min(REST_S, 3 * spent_s)


def places(layout: Layout, slots: SlotMap, group: Group) -> dict[int, Block]:
    """The blocks of a group's slots."""
    geometry = Geometry(layout)
    found = {number: geometry.block(number) for number in blocks_in(group.slots, geometry.blocks, len(slots.owners))}
    return {number: block for number, block in found.items() if block is not None}


def _is_part_of(key: tuple[str, int], migration: Migration | None, state: JobState) -> bool:
    return migration is not None and migration.id == key[0] and migration.timeline == state.timeline

"""A pserver follows the slot map: blocks that it lost are forgotten, blocks that it gained were handed over
before.

memory is reserved, parts of a group arrive -> kept apart -> whole: HAVE
    -> the map gives the group to this pserver -> blocks of its store, served
    -> another migration was planned -> dropped

`follow` is called whenever the view of the job changes, before anybody else sees the change. The map and the
migration that one transaction wrote are seen together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import closing
from typing import TYPE_CHECKING

from pserver_service.checkpoints import ledger_text
from pserver_service.context import PserverContext
from trireme_shared.blocks.buffers import BufferPool
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.errors import NotReady
from trireme_shared.protocol.records import JobState, Mode, SlotMap
from trireme_shared.protocol.records.assignments import Group, Migration, blocks_in
from trireme_shared.protocol.records.layout import ROWS, Block, Layout
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.protocol.wire.messages import HandoffAnswer, HandoffHeader, HandoffPart, InitHeader
from trireme_shared.serving.core.calls import Payload
from trireme_shared.serving.core.geometry import Geometry
from trireme_shared.serving.core.ledger import SavedLedger
from trireme_shared.serving.core.moving import ArrivingBlocks, adopt, forget
from trireme_shared.serving.core.store import Store
from trireme_shared.serving.core.stores import rows_of, store_of

if TYPE_CHECKING:
    from trireme_shared.serving.core.table.moving import ArrivingRows
    from trireme_shared.serving.core.table.rows import TableRows

REST_S = 0.02  # at most; a group has up to 32 pieces, and its source waits for 5 s
LAG_S = 2.0  # until a group is sent again whose rows are a step ahead

log = telemetry.logger("pserver.slots")


class SlotFollower:
    """Takes groups from other parameter servers, and keeps the store's blocks equal to what the slot map
    says."""

    def __init__(self, context: PserverContext) -> None:
        self._context, self._directory, self._pserver = context, context.directory, context.pserver
        self._arriving: dict[tuple[str, int], ArrivingBlocks] = {}
        self._pool: BufferPool | None = None  # of blocks that arrive before there is a store
        self._rows: TableRows | None = None  # the same

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
        if store is not None and store.rows is not None and store.rows.has_dropped:
            self._pserver.row_steps.give_back(store.rows)
        if not self._arriving:
            self._rows = None

    def _take_map(self, store: Store, slots: SlotMap) -> None:
        before, index = store.slots, self._pserver.index
        if before is None or before.version >= slots.version:
            store.slots = before or slots
            return
        self._pserver.row_steps.finish()  # an asynchronous push counts for the slots of one map
        count, mine = len(slots.owners), {slot for slot, owner in enumerate(slots.owners) if owner == index}
        had = {slot for slot, owner in enumerate(before.owners) if owner == index}
        lost = frozenset(blocks_in(had - mine, store.geometry.blocks, count))
        gained = frozenset(blocks_in(mine - had, store.geometry.blocks, count))
        store.slots = slots
        with_rows = store.rows is not None and had != mine
        if lost or (with_rows and had - mine):
            forget(store, lost, had - mine, had & mine)
        if gained or (with_rows and mine - had):
            groups = self._arrived(mine - had, gained)
            if with_rows and not had:
                self._begin_rows(store, groups)
            adopt(store, groups, had & mine)
        if with_rows:
            store.rows.since = slots.version  # type: ignore[union-attr]
        if lost or with_rows:
            self._pserver.forgotten(lost | ({ROWS} if with_rows else frozenset()))
        if lost or gained or with_rows:
            log.info("slots_moved", index=index, version=slots.version, lost=len(lost), gained=len(gained))

    def _begin(self, state: JobState, slots: SlotMap) -> None:
        """The first blocks of a parameter server that has joined by a resize."""
        index, layout = self._pserver.index, self._directory.layout
        mine = {slot for slot, owner in enumerate(slots.owners) if owner == index}
        if layout is None or not mine:
            return
        gained = frozenset(blocks_in(mine, Geometry(layout).blocks, len(slots.owners)))
        groups = self._arrived(mine, gained)
        of_rows = {group.rows.version for group in groups if group.rows is not None}
        version = min((*of_rows, *(moved.version for group in groups for moved in group.blocks)), default=0)
        records = {record.version: record for group in groups for record in group.history.records}
        # rows may be ahead of their record
        last = max((known for known in records if known <= version), default=None)
        record = StepRecord(version=version, positions=()) if last is None else records[last]
        header = self._header(layout, record)
        store = store_of(header, self._pserver.schedule, self._pool, self._pserver.clipping)
        store.seal()
        store.slots, self._pool = slots, None
        if of_rows:
            self._begin_rows(store, groups)
            store.rows.since = slots.version  # type: ignore[union-attr]
        adopt(store, groups)
        self._pserver.restore(store, state.timeline, state.checkpoint)

    def _begin_rows(self, store: Store, groups: Collection[ArrivingBlocks]) -> None:
        """The first slots of this parameter server, with rows of tables."""
        if self._rows is not None:
            store.rows, self._rows = self._rows, None
        assert store.rows is not None
        store.rows.begin_at(max(group.rows.version for group in groups if group.rows is not None))

    def _has_slots(self) -> bool:
        store = self._pserver.store
        return store is not None and store.slots is not None and self._pserver.index in store.slots.owners

    def _header(self, layout: Layout, record: StepRecord) -> InitHeader:
        """Of a store that begins with what others hand over."""
        spec = self._context.spec
        return InitHeader(
            job=self._pserver.job,
            generation=self._directory.state.generation if self._directory.state is not None else 0,
            mode=spec.mode,
            lanes=spec.lanes if spec.mode is Mode.SYNC else 1,
            layout=layout,
            pserver=self._pserver.index,
            record=record,
        )

    def _arrived(self, slots: Collection[int], numbers: frozenset[int]) -> list[ArrivingBlocks]:
        """The groups that consist of these slots, and their blocks. The leader gave them to this process
        because it has them."""
        found = {
            key: group for key, group in self._arriving.items() if group.whole and group.slots <= set(slots)
        }
        there = frozenset(number for group in found.values() for number in group.numbers)
        assert there == numbers, (
            f"blocks {sorted(numbers - there)[:4]} were given to {self!r}, which never got them"
        )
        if any(group.rows is not None for group in found.values()):
            lacking = set(slots).difference(*(group.slots for group in found.values()))
            assert not lacking, (
                f"slots {sorted(lacking)[:4]} were given to {self!r}, which never got their rows"
            )
        for key in found:
            del self._arriving[key]
        return list(found.values())

    # ------------------------------------------------------------ groups that arrive

    async def take(
        self, header: HandoffHeader, parts: AsyncIterator[tuple[HandoffPart, Payload]]
    ) -> HandoffAnswer:
        """Some parts of a group; with the last ones it is whole. Nothing of it is served before the slot map
        says so.

        A repetition changes nothing. Raises NotReady: this pserver knows nothing of that migration, yet or
        any more, or its rows of tables lack a step that those of the group have made; BadFrame.
        """
        self._pserver.check(header)
        if (layout := self._directory.layout) is not None:
            await self._pserver.prepare_tables(layout)
        arriving = self._arriving_of(header)
        with closing(arriving.reserve(header.coming)) as reserving:
            began = clock.monotonic()
            for _ in reserving:
                await asyncio.sleep(rest_s(clock.monotonic() - began))
                began = clock.monotonic()
        async for part, payload in parts:
            view = memoryview(payload)
            for _ in arriving.room_for(part, view.nbytes):
                await asyncio.sleep(0)
            self._check_expected(header, arriving)
            arriving.take(part, view)
            await asyncio.sleep(0)
        self._check_expected(header, arriving)
        if header.whole and not arriving.whole:
            if arriving.rows is not None:
                await self._complete_rows(header, arriving, arriving.rows)
            text = header.ledger or arriving.ledger_text.decode()
            ledger, _ = ledger_text.from_text(text) if text else (SavedLedger({}), ())
            arriving.complete(header.blocks, header.history, ledger)
            self._pserver.generation = max(self._pserver.generation, header.generation)
        return HandoffAnswer(have=arriving.whole)

    async def _complete_rows(
        self, header: HandoffHeader, arriving: ArrivingBlocks, rows: ArrivingRows
    ) -> None:
        """The rows here may be about to make the step that those of the group have made: they never lag
        behind what is adopted."""
        stepped = asyncio.Event()
        self._pserver.lookups.append(stepped.set)
        try:
            async with asyncio.timeout(LAG_S):
                while self._has_slots() and rows.lags(header.rows_version):
                    stepped.clear()
                    await stepped.wait()
        except TimeoutError:
            pass  # `complete` says what is wrong
        finally:
            self._pserver.lookups.remove(stepped.set)
        self._check_expected(header, arriving)
        if not arriving.whole:
            rows.complete(header.tables, header.rows_version, joins=not self._has_slots())

    def _arriving_of(self, header: HandoffHeader) -> ArrivingBlocks:
        """Raises NotReady."""
        key = header.migration, header.group
        group = self._expected(header)
        layout, slots = self._directory.layout, self._directory.slots
        if group is None or layout is None or slots is None:
            msg = (
                f"group {header.group} of migration {header.migration} is not expected at "
                f"pserver-{self._pserver.index} now"
            )
            raise NotReady(msg)
        if key not in self._arriving:
            rows = self._arriving_rows(layout, group)
            found = ArrivingBlocks(places(layout, slots, group), self._memory(), rows, group.slots)
            self._arriving[key] = found
        return self._arriving[key]

    def _arriving_rows(self, layout: Layout, group: Group) -> ArrivingRows | None:
        """None: the model has no tables."""
        if not layout.tables:
            return None
        # numba
        from trireme_shared.serving.core.table.moving import ArrivingOnArrival, ArrivingRows  # noqa: PLC0415

        if self._rows is None and self._pserver.store is not None:
            into = self._pserver.store.rows
        else:
            into = self._rows = self._rows or rows_of(
                self._header(layout, StepRecord(version=0, positions=()))
            )
        assert into is not None
        asynchronous = self._context.spec.mode is Mode.ASYNC
        return (ArrivingOnArrival if asynchronous else ArrivingRows)(into, group.slots)

    def _check_expected(self, header: HandoffHeader, arriving: ArrivingBlocks) -> None:
        if self._arriving.get((header.migration, header.group)) is not arriving:
            raise NotReady(f"migration {header.migration} is over at pserver-{self._pserver.index}")

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
    """After a piece of work that nobody waits for: it shall take a quarter of a processor, and trainers the
    rest."""
    return min(REST_S, 3 * spent_s)


def places(layout: Layout, slots: SlotMap, group: Group) -> dict[int, Block]:
    """The blocks of a group's slots."""
    geometry = Geometry(layout)
    found = {
        number: geometry.block(number)
        for number in blocks_in(group.slots, geometry.blocks, len(slots.owners))
    }
    return {number: block for number, block in found.items() if block is not None}


def _is_part_of(key: tuple[str, int], migration: Migration | None, state: JobState) -> bool:
    return migration is not None and migration.id == key[0] and migration.timeline == state.timeline

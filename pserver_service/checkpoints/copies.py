"""What a parameter server copies for checkpoints: versions of its store, with ledger (asynchronous) and rows
of embedding tables.

Of the tables a part has all rows, or those that changed since the own part of the latest checkpoint (Chains):

part written -> remembered -> its checkpoint is the latest one -> the next part may be a delta on it

A paused checkpoint (PausedCopy): nobody trains, so all blocks are copied at one instant; then training goes
on.

CHECKPOINTING, cut -> older pushes are stale -> copy -> `copied` in ps/<index> -> written in the background
                                                 |-- a long one: `copying` now and then, or the master takes
                                                 |   it for frozen
                                                 `-- the pause was given up meanwhile: nothing is kept

Asynchronous copies have blocks, rows and ledger of one instant: a push that is being stepped is whole, rows
and ledger are copied before the next one begins, then the blocks. If pushes may come meanwhile (independent
checkpoints), each copies the blocks that the copy lacks before it changes them.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from pserver_service.checkpoints.ledger_text import ledger_metadata
from pserver_service.context import PserverContext, StateFollower
from trireme_shared.blocks.snapshot import Snapshot
from trireme_shared.checkpoints.parts import Checkpointer, Copied, Copies
from trireme_shared.checkpoints.saving_context import Cut, GivenUp, SavingContext, read_cut
from trireme_shared.checkpoints.tables import tables_of
from trireme_shared.checkpoints.writer import DeltaBase, narrow_to_changes
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.records import JobState, Phase, SlotMap
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointPart, PartLink
from trireme_shared.protocol.records.layout import ROWS
from trireme_shared.protocol.records.members import pserver_names
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.serving.core.ledger import AsyncSnapshot
from trireme_shared.serving.core.store import Store
from trireme_shared.serving.core.stores import AsyncStore
from trireme_shared.serving.pserver import Pserver

TELL_S = 0.5  # the master takes a parameter server for frozen that says nothing for three times as long
COPY_BYTES = 4 << 20  # of values, with their optimizer's state: a few milliseconds

log = telemetry.logger("pserver.copies")


def saving_of(context: PserverContext) -> SavingContext:
    directory = context.directory
    return SavingContext(
        etcd=context.etcd,
        directory=directory,
        owner=context.pserver,
        own_key=context.own_index,
        offload=context.offload,
        living=lambda _: {index: pserver_names([index]) for index in directory.pservers},
        slots_of=lambda version: (
            directory.slots if directory.slots and directory.slots.version == version else None
        ),
    )


class StoreCopies(Copies):
    """The copies of one parameter server's store, with the `checkpointer` that writes them."""

    def __init__(self, context: PserverContext) -> None:
        super().__init__(context.pserver.snapshot_ready)
        self._context, self._pserver = context, context.pserver
        self._chains = Chains()
        # Of the copy that was taken last. Who rolls back frees the store first: nothing here may keep it.
        self._store: weakref.ref[Store] | None = None
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
        self._store = weakref.ref(store)
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
        snapshot, store = copied.snapshot, self._store() if self._store is not None else None
        if store is None:
            raise GivenUp("the parameters were dropped")
        self._taken = _Taken(store.name, slots, versions_of(snapshot))
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
    """The copy whose part is being written; `store`: its name."""

    store: str
    slots: SlotMap
    versions: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Written:
    part: CheckpointPart
    store: str
    slots: SlotMap
    versions: Mapping[str, int]


def versions_of(snapshot: Snapshot) -> dict[str, int]:
    """The versions of its tables."""
    return {table.spec.name: table.version for table in tables_of(snapshot)}


class Chains:
    """The parts of this process, by the uuid of their checkpoint, since the latest one: a part may build on
    that of the latest checkpoint, if nothing came in between."""

    def __init__(self) -> None:
        self._written: dict[str, _Written] = {}

    def __repr__(self) -> str:
        return f"<Chains: {len(self._written)} parts to build on>"

    def has(self, uuid: str) -> bool:
        """Whether a part may build on that checkpoint."""
        return uuid in self._written

    def base(
        self,
        latest: CheckpointLatest | None,
        damaged: Collection[str],
        store: Store,
        slots: SlotMap,
        most: int,
    ) -> DeltaBase | None:
        """For a part of `store` with these slots. `most`: deltas in a chain. None: it has to be whole. What
        nobody will build on is forgotten."""
        own = self._written.get(latest.uuid) if latest is not None else None
        if own is None or store.rows is None:
            return None
        self._written = {
            uuid: each for uuid, each in self._written.items() if each.part.step >= own.part.step
        }
        store.rows.forget_removed(own.versions)
        chain = (*own.part.chain, own.part.link(latest.uuid if latest is not None else ""))
        same = (own.store, own.slots) == (store.name, slots)
        if not same or len(chain) > most or any(link.uuid in damaged for link in chain):
            return None
        return DeltaBase(chain, own.versions)

    def add(
        self, uuid: str, part: CheckpointPart, store: str, slots: SlotMap, versions: Mapping[str, int]
    ) -> None:
        """A part that is written, of the store with that name."""
        if versions:
            self._written[uuid] = _Written(part, store, slots, versions)


class PausedCopy(StateFollower):
    """Copies the blocks once for each paused checkpoint."""

    def __init__(self, context: PserverContext) -> None:
        super().__init__(context)
        self._answered = ""

    def is_due(self, state: JobState) -> bool:
        if state.phase is not Phase.CHECKPOINTING or state.saving is None or not state.saving.cut:
            return False
        ready = self._pserver.store is not None and self._pserver.timeline == state.timeline
        return ready and self._answered != state.saving.uuid

    async def answer(self, state: JobState) -> None:
        assert state.saving is not None
        step, uuid = state.saving.step, state.saving.uuid
        self._answered = uuid
        begin = told = clock.monotonic()

        def goes_on(blocks: int) -> bool:
            nonlocal told
            if clock.monotonic() - told >= TELL_S:
                told = clock.monotonic()
                self._own_index.set(copying=blocks)
            now = self._directory.state
            return now is not None and now.saving is not None and now.saving.uuid == uuid

        whole = await copy(self._pserver, StepRecord(version=step, positions=()), state.generation, goes_on)
        seconds = round(clock.monotonic() - begin, 3)
        log.info(
            "copied" if whole else "copy_given_up", index=self._pserver.index, step=step, seconds=seconds
        )
        if whole:
            self._own_index.set(copied=uuid, copying=0)


async def copy(pserver: Pserver, record: StepRecord, generation: int, goes_on: Callable[[int], bool]) -> bool:
    """Copy everything for a checkpoint, some blocks at a time. Pushes of lower generations are stale from now
    on.

    `goes_on(blocks)` is asked in between, with the number of blocks that are copied. False: it did not go on,
    a rollback or an update came in between, and nothing is kept."""
    pserver.generation = max(pserver.generation, generation)
    store = pserver.store
    if store is None or not store.numbers:
        return True
    assert isinstance(store, AsyncStore)
    copying = await begin(pserver, store, lambda: store.begin_copy(record))
    if copying is None:
        return False
    kept = False
    try:
        kept = await copy_blocks(pserver, store, copying, goes_on, COPY_BYTES) and store.keep_copy(copying)
    finally:
        if not kept:
            copying.release()
    pserver.look_for_snapshot()
    return kept


async def copy_blocks(
    pserver: Pserver,
    store: AsyncStore,
    copying: AsyncSnapshot,
    goes_on: Callable[[int], bool],
    at_once: int,
) -> bool:
    """What the copy lacks, `at_once` bytes of values between two turns of the event loop. `goes_on`: see
    `copy`. False: it did not go on, or other blocks are there now."""
    copied_bytes = 0
    for done, number in enumerate(number for number in copying.blocks if number != ROWS):
        if copied_bytes >= at_once:
            copied_bytes = 0
            await asyncio.sleep(0)
            if not goes_on(done):
                return False
        if pserver.store is not store or copying.slots != store.slots:
            return False
        if copying.lacks(number):
            store.copy_block(copying, number)
            copied_bytes += store.blocks[number].place.bytes
    return True


async def begin(pserver: Pserver, store: Store, make: Callable[[], AsyncSnapshot]) -> AsyncSnapshot | None:
    """What `make` makes when no push of rows is half applied: a push is whole within tens of milliseconds.
    None: the store was dropped meanwhile."""
    made: asyncio.Future[AsyncSnapshot | None] = asyncio.get_running_loop().create_future()

    def now() -> None:
        if made.done():  # nobody waits any more
            return
        try:
            made.set_result(make() if pserver.store is store else None)
        except Exception as error:
            log.exception("not_copied", index=pserver.index)
            made.set_exception(error)

    pserver.row_steps.between_pushes(now)
    return await made

"""How a parameter server gets its parameters back from a checkpoint: with all others (Rollback), or alone
while they go on (Rejoin).

read a checkpoint -> a store
  `-> unexpected errors -> again, a few times -> CheckpointUnusable: another checkpoint may be readable
  `-> storage not reached -> `waits` in ps/<index> -> PeerError: again; other checkpoints would not be, either

Rollback: ROLLING_BACK seen -> drop (NOT_READY, older pushes stale) -> load (nothing if the job starts over)
  -> serve -> `restored` in ps/<index>
  `-> cannot: `restored` says why; the master chooses another one

Rejoin, asynchronous: index claimed, job initialised, no parameters -> newest usable checkpoint
  -> `restored` in ps/<index> -> counted -> serve
  `-> all are damaged: `restored` says why, and the master fails the job

A checkpoint is read for this parameter server's index and slots. If the slot map changes meanwhile, what was
read is not used. The master limits how long a job waits for its parameters (`recovery_timeout_s`).

A parameter server that rejoins has an older ledger than the others. Trainers whose pushes come too early
resume where it stands. What it lacks of closed tasks is lost; the master counts that from `restored`. It
takes no push before that: a task that a push to it finished would be counted as lost. Nor is it pushed
afterwards what was counted: a trainer whose task was done then by another gives it up.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping

from pserver_service.checkpoints import ledger_text
from pserver_service.checkpoints.ledger_text import LEDGER
from pserver_service.context import LOOK_S, PserverContext, StateFollower
from pserver_service.handoff.follower import SlotFollower
from trireme_shared.blocks.buffers import Buffer, BufferPool
from trireme_shared.blocks.gradient_norm import Clipping
from trireme_shared.checkpoints import stored
from trireme_shared.checkpoints.schedule import Schedule
from trireme_shared.checkpoints.stored import BlockReader, check_model
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.runtime import ids, telemetry
from trireme_shared.platform.storage.tensor_file import Summary
from trireme_shared.protocol.errors import BadFrame, CheckpointUnusable, NotReady, PeerError
from trireme_shared.protocol.records import JobState, Mode, Phase, Restored, SlotMap
from trireme_shared.protocol.records.assignments import slot_of
from trireme_shared.protocol.records.checkpoints import (
    CheckpointLatest,
    CheckpointPart,
    CheckpointRef,
    Manifest,
    OwnCheckpoints,
)
from trireme_shared.protocol.records.layout import Block, OptimizerSpec
from trireme_shared.protocol.wire.messages import InitHeader
from trireme_shared.serving.core.ledger import Ledger, SavedLedger
from trireme_shared.serving.core.store import Store
from trireme_shared.serving.core.stores import AsyncStore, store_of
from trireme_shared.serving.table_loader import TableLoader

PAUSE_S = 0.5
TRIES = 4
GOING_ON = (Phase.RUNNING, Phase.CHECKPOINTING)

log = telemetry.logger("pserver.recovery")


async def kept_checkpoints(
    context: PserverContext, kind: type[CheckpointLatest | OwnCheckpoints]
) -> tuple[CheckpointRef, ...]:
    """Those of the job, or this pserver's own, that may be loaded, newest first. Raises PeerError."""
    key = (
        context.keys.latest
        if kind is CheckpointLatest
        else context.keys.own_checkpoints(context.pserver.index)
    )
    found = await context.etcd.get(key)
    record = read_record(kind, key, found.value if found else None)
    return record.kept if record is not None else ()


async def load_checkpoint(context: PserverContext, ref: CheckpointRef) -> tuple[Store, dict[str, int]]:
    """See `load_store`. Raises CheckpointUnusable; PeerError: try again later."""
    context.pserver.loading = True
    try:
        return await _load(context, ref)
    finally:
        context.pserver.loading = False


async def _load(context: PserverContext, ref: CheckpointRef) -> tuple[Store, dict[str, int]]:
    directory, pserver, cause = context.directory, context.pserver, ""
    for attempt in range(TRIES):
        layout, slots, spec = directory.layout, directory.slots, directory.spec
        if layout is None or slots is None or spec is None:
            raise PeerError("the layout or the slot map is not there yet")
        await pserver.prepare_tables(layout)
        try:
            place = (pserver.index, slots, pserver.schedule, pserver.new_pool(), pserver.clipping)
            found: tuple[Store, dict[str, int]] = await context.offload(
                load_store, spec.storage, context.keys.job, layout.digest, ref, *place, layout.optimizer
            )
        except (CheckpointUnusable, PeerError):
            raise
        except ConnectionError as away:
            msg = f"the storage is not reached: {away}"
            if not context.own_index.record.waits:  # written once, for people to read
                context.own_index.set(
                    waits=f"pserver-{pserver.index} waits to load checkpoint {ref.uuid} (step "
                    f"{ref.step}): {msg}"
                )
            raise PeerError(msg) from away
        except Exception as error:
            cause = (
                f"checkpoint {ref.uuid} (step {ref.step}) could not be read, {attempt + 1} times: {error!r}"
            )
            log.exception("checkpoint_unread", index=pserver.index, cause=cause)
            await asyncio.sleep(ids.jitter(PAUSE_S * 2**attempt))
            continue
        if directory.slots != slots:
            raise PeerError("the slot map changed while the checkpoint was read")
        return found
    raise CheckpointUnusable(cause)


class _Superseded(CheckpointUnusable):
    """The checkpoint is not kept any more."""


class Rollback(StateFollower):
    """Answers each rollback once: it was loaded, or why it could not be."""

    def __init__(self, context: PserverContext, follower: SlotFollower) -> None:
        super().__init__(context)
        self._follower = follower

    def is_due(self, state: JobState) -> bool:
        restored = self._own_index.record.restored
        done = restored is not None and (restored.timeline, restored.checkpoint) == (
            state.timeline,
            state.checkpoint,
        )
        return state.phase is Phase.ROLLING_BACK and not done

    async def answer(self, state: JobState) -> None:
        log.info(
            "rolling_back", index=self._pserver.index, timeline=state.timeline, checkpoint=state.checkpoint
        )
        self._pserver.drop(state.generation)
        restored = Restored(timeline=state.timeline, checkpoint=state.checkpoint)
        if not state.checkpoint:  # training starts over
            self._own_index.set(restored=restored, waits="")
            return
        while self._is_current(state):
            try:
                store, _ = await load_checkpoint(self.context, await self._kept(state.checkpoint))
                if not self._is_current(state):
                    return
                self._pserver.restore(store, state.timeline, state.checkpoint)
                self._follower.follow()  # the slot map may be newer
            except CheckpointUnusable as error:
                restored = restored.with_fields(
                    error=error.message, superseded=isinstance(error, _Superseded)
                )
            except PeerError as error:
                log.warning("restore_delayed", index=self._pserver.index, cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))
                continue
            if restored.error:
                log.error("checkpoint_unusable", index=self._pserver.index, message=restored.error)
            self._own_index.set(restored=restored, waits="")
            return

    async def _kept(self, uuid: str) -> CheckpointRef:
        """Raises CheckpointUnusable, PeerError."""
        refs = {ref.uuid: ref for ref in await kept_checkpoints(self.context, CheckpointLatest)}
        if uuid not in refs:
            raise _Superseded(f"checkpoint {uuid!r} is not among those kept: {', '.join(refs) or 'none'}")
        return refs[uuid]

    def _is_current(self, state: JobState) -> bool:
        now = self._directory.state
        return now is not None and (now.timeline, now.checkpoint) == (state.timeline, state.checkpoint)


class Rejoin(StateFollower):
    """Loads the parameters of a replaced parameter server, and tells the master which minibatches they
    lack."""

    def __init__(self, context: PserverContext, follower: SlotFollower) -> None:
        super().__init__(context)
        self._follower = follower

    def is_due(self, state: JobState) -> bool:
        spec, restored = self._directory.spec, self._own_index.record.restored
        answered = restored is not None and restored.timeline == state.timeline
        slots = self._directory.slots
        joined = state.joined.get(str(self._pserver.index)) == self._pserver.incarnation
        owner = slots is not None and self._pserver.index in slots.serving and not joined
        empty = self._directory.init_done and self._pserver.store is None and owner
        return (
            spec is not None
            and spec.mode is Mode.ASYNC
            and state.phase in GOING_ON
            and empty
            and not answered
        )

    async def answer(self, state: JobState) -> None:
        log.info("rejoining", index=self._pserver.index, timeline=state.timeline)
        while self._is_current(state):
            try:
                store, restored = await self._load(state.timeline)
            except CheckpointUnusable as error:
                lost = Restored(timeline=state.timeline, checkpoint="", error=error.message, rejoined=True)
                self._own_index.set(restored=lost, waits="")
                return
            except PeerError as error:
                log.warning("rejoin_delayed", index=self._pserver.index, cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))
                continue
            if not self._is_current(state):
                return
            self._own_index.set(restored=restored, waits="")
            await self._serve(state, store, restored)
            return

    async def _serve(self, state: JobState, store: Store, restored: Restored) -> None:
        """Once what is lacking is on record. The master limits how long a job waits for its parameters."""
        while (now := self._directory.state) is not None and self._is_current(state):
            if now.mends.get(str(self._pserver.index)) == self._pserver.incarnation:
                self._pserver.generation = max(self._pserver.generation, now.generation)
                self._pserver.restore(store, state.timeline, restored.checkpoint)
                self._follower.follow()  # the slot map may be newer
                return
            await self._directory.changed(self._directory.revision, LOOK_S)

    async def _load(self, timeline: int) -> tuple[Store, Restored]:
        """The newest usable checkpoint, and what to say of it. Raises CheckpointUnusable if none can be used,
        also none that is written meanwhile; PeerError, also while there is none at all: whether one comes,
        or the job starts over or fails, is the leader's to say."""
        kind = CheckpointLatest if self.context.spec.checkpoint_kind == "coordinated" else OwnCheckpoints
        damaged: dict[str, str] = {}
        while refs := [ref for ref in await kept_checkpoints(self.context, kind) if ref.uuid not in damaged]:
            try:
                store, positions = await load_checkpoint(self.context, refs[0])
            except CheckpointUnusable as error:
                log.warning("checkpoint_unusable", index=self._pserver.index, message=error.message)
                damaged[refs[0].uuid] = error.message
                continue
            return store, Restored(
                timeline=timeline,
                checkpoint=refs[0].uuid,
                rejoined=True,
                positions=positions,
                blocks=len(store.numbers),
                damaged="; ".join(damaged.values()),
            )
        if not damaged:
            raise NotReady(f"there is no checkpoint of pserver-{self._pserver.index} yet")
        found = f"{len(damaged)} cannot be used: {'; '.join(damaged.values())}"
        raise CheckpointUnusable(f"no checkpoint of pserver-{self._pserver.index} is left: {found}")

    def _is_current(self, state: JobState) -> bool:
        now = self._directory.state
        return now is not None and now.timeline == state.timeline and now.phase in GOING_ON


# --------------------------------------------------- a store from the parts of a checkpoint; all of it blocks


def load_store(
    storage_url: str,
    job: str,
    digest: str,
    ref: CheckpointRef,
    index: int,
    slots: SlotMap,
    schedule: Schedule | None,
    pool: BufferPool | None = None,
    clipping: Clipping | None = None,
    optimizer: OptimizerSpec | None = None,
) -> tuple[Store, dict[str, int]]:
    """A store of the blocks that `slots` gives to pserver `index`; the number of pservers that wrote the
    parts does not matter. Each part that holds some of them is read whole and checked. Second: how many
    minibatches all blocks have of each task that was open at an asynchronous checkpoint (-1: all). `digest`:
    of the job's layout. `optimizer`: the job's, which may have other options than the checkpoint was made
    with; None: that of the checkpoint.

    Raises CheckpointUnusable, OSError.
    """
    manifest = stored.read_manifest(storage_url, job, ref)
    check_model(manifest, ref, digest)
    store = store_of(_header(manifest, index, optimizer), schedule, pool, clipping)
    parts = {part.pserver: part for part in manifest.parts}
    ledgers: dict[int, tuple[SavedLedger, int]] = {}
    of_rows: list[tuple[SavedLedger, int, int]] = []
    tables = TableLoader.of(store.rows, index, slots, ref)
    wanted = _wanted(manifest, store, index, slots)
    if tables is not None:
        wanted |= {owner: wanted.get(owner, {}) for owner in tables.owners(manifest.slots)}
        tables.go_on_from(manifest.parts)
    for owner, blocks in sorted(wanted.items()):
        if owner not in parts:
            stored.unusable(ref, f"it lacks part of pserver-{owner}")
        summary = _load_part(storage_url, ref, parts[owner], blocks, store, tables)
        if manifest.mode is Mode.ASYNC:
            saved, numbers = _ledger(ref, summary)
            ledgers |= {number: (saved, position) for position, number in enumerate(numbers)}
            own = tables.slots_from(owner, manifest.slots) if tables is not None else 0
            of_rows += [(saved, len(numbers) + place, bits & own) for place, bits in enumerate(saved.slots)]
    store.seal()
    store.slots = slots
    if store.rows is not None:
        store.rows.since = slots.version  # a push by an older map has no ids of slots that came since
    if not isinstance(store, AsyncStore):
        return store, {}
    if missing := [number for number in store.blocks if number not in ledgers]:
        stored.unusable(ref, f"it lacks ledger of blocks {missing[:4]}")
    store.ledger = Ledger.loaded([ledgers[number] for number in store.blocks], of_rows)
    if tables is not None and sum(store.ledger.slots) != tables.slots:
        stored.unusable(ref, "it lacks ledger of rows of some slots")
    positions = store.ledger.positions(stored.open_tasks(manifest))
    return store, {str(task): minibatches for task, minibatches in positions.items()}


def _ledger(ref: CheckpointRef, summary: Summary) -> tuple[SavedLedger, tuple[int, ...]]:
    """Of a part, and its blocks."""
    try:
        return ledger_text.from_text(summary.metadata.get(LEDGER, ""))
    except BadFrame as error:
        stored.unusable(ref, f"it lacks ledger of its part: {error.message}", error)


def _header(manifest: Manifest, index: int, optimizer: OptimizerSpec | None) -> InitHeader:
    layout = manifest.layout
    return InitHeader(
        job=manifest.job,
        generation=manifest.timeline,
        mode=manifest.mode,
        lanes=manifest.lanes,
        layout=layout.with_fields(optimizer=optimizer) if optimizer is not None else layout,
        pserver=index,
        record=manifest.record,
    )


def _wanted(manifest: Manifest, store: Store, index: int, slots: SlotMap) -> dict[int, dict[int, Block]]:
    """Pserver that wrote the part -> the blocks in it that pserver `index` owns now."""
    wanted: dict[int, dict[int, Block]] = defaultdict(dict)
    for number in range(store.geometry.blocks):
        slot = slot_of(number, manifest.layout.slot_count)
        block = store.geometry.block(number)
        if slots.owners[slot] == index and block is not None:
            wanted[manifest.slots.owners[slot]][number] = block
    return wanted


def _load_part(
    storage_url: str,
    ref: CheckpointRef,
    part: CheckpointPart,
    blocks: Mapping[int, Block],
    store: Store,
    tables: TableLoader | None,
) -> Summary:
    def take(place: Block) -> tuple[Buffer, memoryview]:
        values = store.pool.take(place.dtype, place.elements)
        return values, values.view

    reader = BlockReader(ref, blocks, take)
    sink = reader.sink
    summary = (
        stored.read_part(storage_url, ref, part, sink)
        if tables is None
        else tables.load(storage_url, part, sink)
    )
    for number, values, state in reader.loaded(part.file):
        store.place_block(number, values, state)
    return summary

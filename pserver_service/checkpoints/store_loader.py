"""A store is made from the parts of a checkpoint; the number of pservers that wrote them does not matter. Everything here blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from pserver_service.checkpoints import ledger_text
from pserver_service.checkpoints.ledger_text import LEDGER
from trireme_shared.blocks.buffers import Buffer, BufferPool
from trireme_shared.checkpoints import stored
from trireme_shared.checkpoints.block_reader import BlockReader, check_model
from trireme_shared.checkpoints.schedule import Schedule
from trireme_shared.platform.storage.tensor_file import Summary
from trireme_shared.protocol.errors import BadFrame
from trireme_shared.protocol.records import Mode, SlotMap
from trireme_shared.protocol.records.assignments import slot_of
from trireme_shared.protocol.records.checkpoints import CheckpointPart, CheckpointRef, Manifest
from trireme_shared.protocol.records.layout import Block
from trireme_shared.protocol.wire.messages import InitHeader
from trireme_shared.serving.core.asynchronous.ledger import Ledger
from trireme_shared.serving.core.asynchronous.saved_ledger import SavedLedger
from trireme_shared.serving.core.clipping import Clipping
from trireme_shared.serving.core.store import Store
from trireme_shared.serving.core.stores import AsyncStore, store_of
from trireme_shared.serving.table_loader import TableLoader


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
) -> tuple[Store, dict[str, int]]:
    """A store of the blocks that `slots` gives to pserver `index`. Each part that holds some of them is read whole and checked.
    Second: how many minibatches all blocks have of each task that was open at an asynchronous checkpoint (-1: all).
    `digest`: of the job's layout.

    Raises CheckpointUnusable, OSError.
    """
    manifest = stored.read_manifest(storage_url, job, ref)
    check_model(manifest, ref, digest)
    store = store_of(_header(manifest, index), schedule, pool, clipping)
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


def _header(manifest: Manifest, index: int) -> InitHeader:
    return InitHeader(
        job=manifest.job,
        generation=manifest.timeline,
        mode=manifest.mode,
        lanes=manifest.lanes,
        layout=manifest.layout,
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
    summary = stored.read_part(storage_url, ref, part, sink) if tables is None else tables.load(storage_url, part, sink)
    for number, values, state in reader.loaded(part.file):
        store.place_block(number, values, state)
    return summary

"""A whole checkpoint, of either strategy, with the rows of all embedding tables, into the replica of one trainer. Everything here blocks."""

from __future__ import annotations

from collections import defaultdict

from trainer_agent.collective.replica import Replica, rows_of
from trainer_agent.model.compute import Compute
from trireme_shared.checkpoints import stored
from trireme_shared.checkpoints.block_reader import BlockReader, check_model
from trireme_shared.protocol.errors import CheckpointUnusable
from trireme_shared.protocol.records import Mode, SlotMap
from trireme_shared.protocol.records.assignments import slot_of
from trireme_shared.protocol.records.checkpoints import CheckpointRef, Manifest
from trireme_shared.protocol.records.layout import Block, Layout
from trireme_shared.serving.table_loader import TableLoader


def load_replica(
    storage_url: str, job: str, ref: CheckpointRef, lanes: int, compute: Compute, replica: Replica, timeline: int
) -> Manifest:
    """Parameters, the optimizer's state and the record of the version; the replica is at that version of `timeline` then. Each part is read whole
    and checked. `lanes`: of the job.

    Raises CheckpointUnusable, OSError: the replica has no version then.
    """
    manifest = stored.read_manifest(storage_url, job, ref)
    layout = compute.layout
    check_model(manifest, ref, layout.digest)
    if manifest.mode is not Mode.SYNC or manifest.layout.tables != layout.tables or manifest.lanes != lanes:
        what = f"mode {manifest.mode}, {manifest.lanes} lanes, {_named(manifest.layout)}"
        wanted = f"mode {Mode.SYNC}, {lanes} lanes, {_named(layout)}"
        msg = f"checkpoint {ref.uuid} (step {ref.step}) is of a job with {what}; a collective job that loads it has {wanted}"
        raise CheckpointUnusable(msg)
    replica.forget()
    parts = {part.pserver: part for part in manifest.parts}
    rows, everywhere = rows_of(layout, manifest.step), SlotMap(version=0, owners=(0,) * layout.slot_count)
    tables, wanted_blocks = TableLoader.of(rows, 0, everywhere, ref), _by_owner(manifest, layout)
    if tables is not None:
        wanted_blocks |= {owner: wanted_blocks.get(owner, {}) for owner in set(manifest.slots.owners)}

    def take(block: Block) -> tuple[memoryview, memoryview]:
        values = memoryview(compute.staging(block.number)).cast("B")
        return values, values

    for owner, blocks in sorted(wanted_blocks.items()):
        if owner not in parts:
            stored.unusable(ref, f"it lacks the part of owner {owner}")
        reader: BlockReader[memoryview] = BlockReader(ref, blocks, take)
        if tables is None:
            stored.read_part(storage_url, ref, parts[owner], reader.sink)
        else:
            tables.load(storage_url, parts[owner], reader.sink)
        for number, values, state in reader.loaded(parts[owner].file):
            replica.load(number, values, state)
    replica.loaded(manifest.record, timeline, ref.uuid, rows)
    return manifest


def _named(layout: Layout) -> str:
    names = ", ".join(f"{spec.name} ({spec.dim} numbers)" for spec in layout.tables)
    return f"embedding tables {names:.200}" if names else "no embedding tables"


def _by_owner(manifest: Manifest, layout: Layout) -> dict[int, dict[int, Block]]:
    """Who wrote the part -> its blocks."""
    found: dict[int, dict[int, Block]] = defaultdict(dict)
    for block in layout.blocks():
        found[manifest.slots.owners[slot_of(block.number, manifest.layout.slot_count)]][block.number] = block
    return found

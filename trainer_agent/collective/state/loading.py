"""A whole checkpoint, of either strategy, into the replica of one trainer. Everything here blocks."""

from __future__ import annotations

from collections import defaultdict

from shared.checkpoints import stored
from shared.checkpoints.block_reader import BlockReader, check_model
from shared.errors import CheckpointUnusable
from shared.records import Mode
from shared.records.checkpoints import CheckpointRef, Manifest
from shared.records.layout import Block, Layout
from shared.slots import slot_of
from trainer_agent.collective.replica import Replica
from trainer_agent.model.compute import Compute


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
    if manifest.mode is not Mode.SYNC or manifest.layout.tables or manifest.lanes != lanes:
        what = f"mode {manifest.mode}, {manifest.lanes} lanes, {len(manifest.layout.tables)} embedding tables"
        wanted = f"mode {Mode.SYNC}, {lanes} lanes, no embedding tables"
        msg = f"checkpoint {ref.uuid} (step {ref.step}) is of a job with {what}; a collective job that loads it has {wanted}"
        raise CheckpointUnusable(msg)
    replica.forget()
    parts = {part.pserver: part for part in manifest.parts}

    def take(block: Block) -> tuple[memoryview, memoryview]:
        values = memoryview(compute.staging(block.number)).cast("B")
        return values, values

    for owner, blocks in sorted(_by_owner(manifest, layout).items()):
        if owner not in parts:
            stored.unusable(ref, f"it lacks the part of owner {owner}")
        reader: BlockReader[memoryview] = BlockReader(ref, blocks, take)
        stored.read_part(storage_url, ref, parts[owner], reader.sink)
        for number, values, state in reader.loaded(parts[owner].file):
            replica.load(number, values, state)
    replica.loaded(manifest.record, timeline, ref.uuid)
    return manifest


def _by_owner(manifest: Manifest, layout: Layout) -> dict[int, dict[int, Block]]:
    """Who wrote the part -> its blocks."""
    found: dict[int, dict[int, Block]] = defaultdict(dict)
    for block in layout.blocks():
        found[manifest.slots.owners[slot_of(block.number, manifest.layout.slot_count)]][block.number] = block
    return found

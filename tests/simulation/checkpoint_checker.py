"""Checks every new `checkpoints/latest`: each checkpoint it names can be loaded at once, holds one version,
and has the same bits as every other checkpoint of that version."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from pserver_service.recovery import load_store
from tests.simulation.rows import records_of
from trireme_shared.checkpoints import stored
from trireme_shared.checkpoints.tables import table_in
from trireme_shared.platform.storage.tensor_file import Entry
from trireme_shared.protocol.errors import CheckpointUnusable
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointRef, Manifest

STORAGE = "memory://simulated"


class CheckpointChecker:
    def __init__(self, job: str) -> None:
        self._job = job
        self._order = (-1, -1)
        self._bits: dict[int, str] = {}

    def check(self, value: bytes) -> Iterator[str]:
        """What is wrong with a new `checkpoints/latest`."""
        latest = CheckpointLatest.model_validate_json(value)
        order = (latest.timeline, latest.step)
        if order <= self._order:
            yield f"latest went from (timeline, step) {self._order} to {order}"
        self._order = order
        for ref in latest.kept:
            try:
                bits = self._bits_of(ref)
            except CheckpointUnusable as error:
                yield f"latest keeps what cannot be loaded: {error}"
                continue
            if self._bits.setdefault(ref.step, bits) != bits:
                yield f"two checkpoints of step {ref.step} differ"

    def _bits_of(self, ref: CheckpointRef) -> str:
        manifest = stored.read_manifest(STORAGE, self._job, ref)
        blocks: dict[str, bytearray] = {}

        def place(entry: Entry) -> memoryview | None:
            if table_in(entry.name) is not None:
                return None
            blocks[entry.name] = bytearray(entry.bytes)
            return memoryview(blocks[entry.name])

        for part in manifest.parts:
            stored.read_part(STORAGE, ref, part, place)
        record = manifest.record.model_dump(
            exclude={"lane_zero": {"asked"}, "results": True}
        )  # who asked, and what the master has stored, are no bits of the model
        content = (record, sorted(blocks.items()), self._rows_of(ref, manifest))
        return hashlib.sha256(repr(content).encode()).hexdigest()

    def _rows_of(self, ref: CheckpointRef, manifest: Manifest) -> bytes:
        """Of its table, as a parameter server that has all slots loads them: out of a whole part, or of one
        and deltas."""
        if not manifest.layout.tables:
            return b""
        slots = manifest.slots.model_copy(update={"owners": (0,) * len(manifest.slots.owners)})
        store, _ = load_store(STORAGE, self._job, manifest.layout.digest, ref, 0, slots, None)
        assert store.rows is not None
        [table] = store.rows.tables
        return records_of([table]) + (b"" if table.sketch is None else table.sketch.tobytes())

"""Rows are loaded some slots at a time: beside the tables there is hardly any memory, and what a command
announces is enough."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.equipment.replaced import replaced
from tests.pserver_service.checkpoints import parts
from tests.pserver_service.jobs import init_header
from tests.shared.serving.table.tables import LAYOUT
from trireme_shared.checkpoints import stored, writer
from trireme_shared.checkpoints.writer import DeltaBase, narrow_to_changes
from trireme_shared.protocol.errors import CheckpointUnusable
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.checkpoints import CheckpointRef
from trireme_shared.protocol.records.layout import RowInit, RowOptimizer, TableSpec
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.serving.core.stores import AsyncStore
from trireme_shared.tables import snapshot as snapshots
from trireme_shared.tables.first_use import compile_loops
from trireme_shared.tables.needs import needs_of

SLOTS, DIM = 128, 16
SPEC = TableSpec(
    name="big",
    dim=DIM,
    optimizer=RowOptimizer(kind="adam", lr=0.1),
    init=RowInit(kind="uniform", scale=0.1),
)
TABLES = LAYOUT.model_copy(update={"slot_count": SLOTS, "digest": "d1", "segments": (), "tables": (SPEC,)})
GROUP_BYTES = 256 << 10
ROW_BYTES = 8 * snapshots.record_words(SPEC.row_words)


def saved(folder: Path, rows: int) -> CheckpointRef:
    """Of one parameter server of an asynchronous job that has so many rows."""
    store = AsyncStore(init_header(TABLES, Mode.ASYNC, 1))
    store.seal()
    store.slots = parts.slot_map(1)
    ids = np.arange(rows, dtype=np.int64) * 7 - 1000
    for _ in store.rows.apply([ids], [np.ones((rows, DIM), np.float32)], 1):
        pass
    copied = store.begin_copy(StepRecord(version=1, positions=()))
    with replaced(snapshots, "GROUP_BYTES", GROUP_BYTES):
        ref = parts.save(str(folder), TABLES, [copied], parts.slot_map(1))
    copied.release()
    return ref


def loaded(folder: Path, ref: CheckpointRef) -> AsyncStore:
    [store] = parts.load(str(folder), ref, 1)
    return store


def test_beside_the_table_there_are_the_rows_of_some_slots_alone(tmp_path):
    rows = 60_000
    ref = saved(tmp_path, rows)
    compile_loops()
    tracemalloc.start()
    try:
        store = loaded(tmp_path, ref)
        left, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert store.rows.rows == rows
    assert most - left < 8 * GROUP_BYTES < rows * ROW_BYTES / 5


def peak_of(work: Callable[[], Any]) -> tuple[Any, int]:
    """And by how many bytes this process is larger than before, at most."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the peak of this process cannot be reset")
    before = psutil.Process().memory_info().rss
    found = work()
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return found, 1024 * int(lines["VmHWM"].split()[0]) - before


def test_loading_takes_no_more_than_what_is_announced(tmp_path):
    rows = 300_000
    ref = saved(tmp_path, rows)
    compile_loops()
    store, peak = peak_of(lambda: loaded(tmp_path, ref))
    assert store.rows.rows == rows
    announced = needs_of(SPEC, rows, 0, SLOTS)
    assert rows * SPEC.row_words * 4 < peak < announced.total


def test_a_damaged_part_is_found_although_its_rows_were_read(tmp_path):
    ref = saved(tmp_path, 3000)
    manifest = stored.read_manifest(str(tmp_path), parts.JOB, ref)
    part = Path(stored.folder(str(tmp_path), ref.uuid)) / manifest.parts[0].file
    whole = part.read_bytes()
    rng = np.random.default_rng(5)
    for place in (len(whole) // 2, len(whole) - 9, len(whole) - ROW_BYTES * 40):
        part.write_bytes(whole[:place] + rng.bytes(8) + whole[place + 8 :])
        with pytest.raises(CheckpointUnusable, match="has checksum"):
            loaded(tmp_path, ref)
    part.write_bytes(whole)
    assert loaded(tmp_path, ref).rows.rows == 3000


def test_rows_of_a_chain_of_any_length_are_the_newest_ones(tmp_path):
    """One row in a delta: its memory must not be that of the next tensor."""
    store = AsyncStore(init_header(TABLES, Mode.ASYNC, 1))
    store.seal()
    store.slots = parts.slot_map(1)
    rows, links, refs, known = store.rows, [], [], {}
    for number, ids in enumerate([np.arange(500), np.array([3]), np.array([3, 900]), np.array([7])]):
        for _ in rows.apply([ids], [np.full((len(ids), DIM), number + 1.0, np.float32)], 1):
            pass
        copied = store.begin_copy(StepRecord(version=number + 1, positions=()))
        versions = {SPEC.name: rows.version}
        if links:
            base = DeltaBase(tuple(links), known)
            assert narrow_to_changes(copied, base)
        refs.append(parts.save(str(tmp_path), TABLES, [copied], parts.slot_map(1), uuid=f"u{number}"))
        manifest = stored.read_manifest(str(tmp_path), parts.JOB, refs[-1])
        links.append(manifest.parts[0].link(refs[-1].uuid))
        known = versions
        copied.release()
    chained = with_chain(tmp_path, refs[-1], tuple(links[:-1]))
    found, wanted = loaded(tmp_path, chained), store
    every = np.arange(1000)
    assert bytes(found.rows.lookup(None, [every])) == bytes(wanted.rows.lookup(None, [every]))
    assert found.rows.rows == 501


def with_chain(folder: Path, ref: CheckpointRef, chain: tuple[Any, ...]) -> CheckpointRef:
    manifest = stored.read_manifest(str(folder), parts.JOB, ref)
    part = manifest.parts[0].model_copy(update={"chain": chain})
    name = writer.write_manifest(str(folder), manifest.model_copy(update={"parts": (part,)}))
    return ref.model_copy(update={"manifest": name})

"""Rows of asynchronous pushes: each minibatch once for each slot, wherever the slots came from; and how old
rows are."""

from __future__ import annotations

import numpy as np
import pytest

from tests.equipment.cluster.lookups import lookup
from tests.pserver_service.checkpoints import parts
from tests.pserver_service.jobs import async_header, init_header
from tests.shared.serving.table.tables import LAYOUT, NONE, SPECS, ids, pushed_rows, values_in, wanted
from trireme_shared.checkpoints.stored import read_manifest
from trireme_shared.checkpoints.tables import read_rows
from trireme_shared.protocol.errors import CheckpointUnusable, InvalidArgument
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.protocol.wire.messages import TableRequest, Verdict
from trireme_shared.serving.block_server import BlockServer
from trireme_shared.serving.core.calls import OpenPush
from trireme_shared.serving.core.stores import AsyncStore
from trireme_shared.serving.data_plane.lookups import portion
from trireme_shared.serving.pserver import Pserver
from trireme_shared.tables.hashing import slots_of
from trireme_shared.tables.memory import ages_of

JOB_LAYOUT = LAYOUT.model_copy(update={"slot_count": 128, "digest": "d1", "segments": ()})
MINIBATCHES, COUNT = 4, 128
ITEMS = np.arange(40)
SLOTS = slots_of(ITEMS, SPECS[0].seed, COUNT)


def store_of(index: int, pservers: int = 2) -> AsyncStore:
    """Without blocks: all that is pushed is rows."""
    made = AsyncStore(init_header(JOB_LAYOUT, Mode.ASYNC, 1, pserver=index))
    made.seal()
    made.slots = parts.slot_map(pservers)
    return made


def push(
    store: AsyncStore,
    index: int,
    start: int,
    *keys: np.ndarray,
    task: int = 0,
    value: float = 1.0,
    by: int = 0,
    **fields,
) -> str:
    """Minibatch `start` of a task, `by` this version of the slot map; the worst that is said of it, or how it
    was taken."""
    server = BlockServer("ctr", "ps-1")
    server.store, server.index = store, index
    pushing = OpenPush(server, store, async_header(task, start, start + 1, MINIBATCHES, **fields))
    item, payload = pushed_rows(0, *keys, value=value)
    pushing.apply(item.model_copy(update={"slots": by}), memoryview(payload))
    answer = pushing.answer()
    if answer.refused:
        return answer.refused[0].code
    return "APPLIED" if answer.applied else "DUPLICATE"


def next_of(store: AsyncStore, task: int = 0) -> int:
    return store.ledger.next_of(0, task).next


def values(store: AsyncStore, *keys: np.ndarray) -> list[list[list[float]]]:
    return values_in(store.rows.lookup(None, keys), *(len(some) for some in keys))


def of_server(index: int, pservers: int = 2) -> np.ndarray:
    return ITEMS[SLOTS % pservers == index]


def test_a_push_counts_once_for_all_slots_also_without_an_id():
    store, (one, *_) = store_of(0), of_server(0)
    assert push(store, 0, 0, NONE, NONE) == "APPLIED"
    assert (next_of(store), store.rows.version) == (1, 1)
    assert push(store, 0, 0, NONE, NONE) == "DUPLICATE"
    assert push(store, 0, 0, ids(one), NONE) == "DUPLICATE"
    assert push(store, 0, 1, ids(one), NONE) == "APPLIED"
    assert push(store, 0, 1, ids(one), NONE, value=50.0) == "DUPLICATE"
    assert push(store, 0, 3, ids(one), NONE) == Verdict.TOO_EARLY
    assert (next_of(store), store.rows.version) == (2, 2)
    assert values(store, ids(one), NONE) == [[[-0.5, -0.5]], []]
    assert [push(store, 0, start, NONE, NONE) for start in (2, 3)] == ["APPLIED"] * 2
    assert store.ledger.next_of(0, 0).closed
    assert push(store, 0, 3, ids(one), NONE) == "DUPLICATE"


def test_an_older_attempt_and_rows_of_others_change_nothing():
    store, (one, *_), (other, *_) = store_of(0), of_server(0), of_server(1)
    assert push(store, 0, 0, ids(one), NONE, attempt=2) == "APPLIED"
    assert push(store, 0, 1, ids(one), NONE, attempt=1) == Verdict.STALE_ATTEMPT
    assert push(store, 0, 1, ids(other), NONE, attempt=2) == Verdict.WRONG_OWNER
    assert (next_of(store), store.rows.version) == (1, 1)


def test_a_minibatch_without_records_steps_no_row_and_counts():
    store = store_of(0)
    for _ in store.rows.apply([NONE, NONE], [np.empty((0, spec.dim), np.float32) for spec in SPECS], 0):
        pass
    assert (store.rows.version, {table.updates for table in store.rows.tables}) == (1, {0})


def copied(stores: list[AsyncStore]) -> list:
    """What a paused checkpoint has of them."""
    return [store.begin_copy(StepRecord(version=9, positions=())) for store in stores]


@pytest.fixture
def checkpoint(tmp_path):
    """Two parameter servers at one instant. Server 0 has a minibatch more: the trainer that pushed it was
    left out of the pause."""
    stores = [store_of(0), store_of(1)]
    for index, store in enumerate(stores):
        mine = of_server(index)
        assert push(store, index, 0, mine[:2], NONE) == "APPLIED"
        assert push(store, index, 1, mine[:1], NONE) == "APPLIED"
    assert push(stores[0], 0, 2, of_server(0)[:1], NONE) == "APPLIED"
    taken = copied(stores)
    assert push(stores[0], 0, 3, of_server(0)[:1], NONE) == "APPLIED"  # not in the copy
    ref = parts.save(str(tmp_path), JOB_LAYOUT, taken, parts.slot_map(2))
    for snapshot in taken:
        snapshot.release()
    return str(tmp_path), ref


def load(checkpoint, pservers: int) -> list[AsyncStore]:
    storage, ref = checkpoint
    return parts.load(storage, ref, pservers)


@pytest.mark.parametrize("pservers", [1, 2, 3])
def test_each_slot_goes_on_where_its_rows_stand_whoever_owns_it(checkpoint, pservers):
    stores = load(checkpoint, pservers)
    first, second = of_server(0)[:1], of_server(1)[:1]
    for start in (1, 2, 3):
        for index, store in enumerate(stores):
            keys = np.array([key for key in (*first, *second) if SLOTS[key] % pservers == index], np.int64)
            assert push(store, index, start, np.sort(keys), NONE) in ("APPLIED", "DUPLICATE")
    assert all(store.ledger.next_of(0, 0).closed for store in stores)
    for key in (*first, *second):
        (found,) = [store for index, store in enumerate(stores) if SLOTS[key] % pservers == index]
        assert values(found, ids(key), NONE)[0] == [[0.5 - MINIBATCHES] * 2]


def test_rows_that_were_loaded_take_no_push_by_an_older_map(checkpoint):
    """It has no ids of slots that came to this parameter server since; their minibatch would count as
    done."""
    (store,) = parts.load(*checkpoint, 1, version=3)
    mine = of_server(0)[:1]
    assert push(store, 0, 2, mine, NONE, by=2) == Verdict.WRONG_OWNER
    assert next_of(store) == 2
    assert push(store, 0, 2, mine, NONE, by=3) == "APPLIED"


def test_a_push_that_is_due_for_some_slots_is_applied_to_those(checkpoint):
    (store,) = load(checkpoint, 1)
    assert (next_of(store), len(store.ledger.slots)) == (2, 2)
    first, second = of_server(0)[0], of_server(1)[0]
    both = ids(*sorted((first, second)))
    before = {key: values(store, ids(key), NONE)[0][0][0] for key in (first, second)}
    assert push(store, 0, 2, both, NONE) == "APPLIED"
    assert values(store, ids(first), NONE)[0][0][0] == before[first]
    assert values(store, ids(second), NONE)[0][0][0] == before[second] - 1
    assert push(store, 0, 2, both, NONE) == "DUPLICATE"
    assert push(store, 0, 3, both, NONE) == "APPLIED"


def test_slots_with_one_history_are_one_position(tmp_path):
    stores = [store_of(0), store_of(1)]
    for index, store in enumerate(stores):
        push(store, index, 0, of_server(index)[:3], NONE)
    taken = copied(stores)
    ref = parts.save(str(tmp_path), JOB_LAYOUT, taken, parts.slot_map(2))
    for pservers in (1, 3):
        for store in parts.load(str(tmp_path), ref, pservers):
            assert (next_of(store), len(store.ledger.slots)) == (1, 1)


def test_rows_are_as_old_as_they_were_though_servers_count_for_themselves(checkpoint):
    (store,) = load(checkpoint, 1)
    table = store.rows.tables[0]
    assert (store.rows.version, table.version, table.updates) == (3, 3, 3)
    ages = {}
    for slot in table.slots():
        rows = table.read_slot(slot)
        ages |= dict(zip(rows.ids.tolist(), ages_of(rows.words, table.version).tolist(), strict=True))
    (a, b), (c, d) = of_server(0)[:2], of_server(1)[:2]
    assert ages == {a: 0, b: 2, c: 0, d: 1}


def test_expired_rows_are_told_by_the_count_of_their_server(checkpoint):
    storage, ref = checkpoint
    manifest = read_manifest(storage, parts.JOB, ref)
    spec = manifest.layout.tables[0].model_copy(update={"evict_after_steps": 1})
    found: list[int] = []
    assert read_rows(storage, ref, manifest, spec, lambda rows: found.extend(rows.ids.tolist())) == 3
    (a, _), (c, d) = of_server(0)[:2], of_server(1)[:2]
    assert sorted(found) == sorted((a, c, d))


def test_a_part_whose_ledger_lacks_rows_is_not_used(tmp_path):
    stores = [store_of(0), store_of(1)]
    stores[1].ledger.slots = (1,)
    taken = copied(stores)
    ref = parts.save(str(tmp_path), JOB_LAYOUT, taken, parts.slot_map(2))
    parts.load_store(str(tmp_path), parts.JOB, "d1", ref, 0, parts.slot_map(2), None)
    with pytest.raises(CheckpointUnusable, match="lacks ledger of rows of some slots"):
        parts.load_store(str(tmp_path), parts.JOB, "d1", ref, 1, parts.slot_map(2), None)


async def test_the_newest_rows_are_read_and_no_version_can_be_asked_for():
    pserver = Pserver(parts.JOB, "ps-1", index=0)
    pserver.store = store_of(0)
    key = of_server(0)[:1]
    push(pserver.store, 0, 0, key, NONE)
    request, payload = wanted(None, key, NONE)
    assert values_in(await lookup(pserver, request, payload), 1, 0) == [[[-0.5, -0.5]], []]
    with pytest.raises(InvalidArgument, match=r"version 1 were asked for in async mode, .* ask for None"):
        await lookup(pserver, request.model_copy(update={"version": 1}), payload)
    whole = TableRequest(job=parts.JOB, generation=1, version=None, table=0)
    end, _ = portion(pserver, whole)
    assert (end.rows, end.total, end.next) == (1, 1, COUNT)
    with pytest.raises(InvalidArgument, match="version 0 were asked for in async mode"):
        portion(pserver, whole.model_copy(update={"version": 0}))


def test_a_copy_of_rows_is_kept_only_with_the_ledger_of_its_instant():
    store = store_of(0)
    push(store, 0, 0, of_server(0)[:2], NONE)
    (copying,) = copied([store])
    push(store, 0, 1, NONE, NONE)
    assert not store.keep_copy(copying)
    copying.release()
    (copying,) = copied([store])
    assert store.keep_copy(copying)
    assert (store.take_snapshot(), copying.rows_version) == (copying, 2)

"""The parts of embedding tables in collective jobs: mean gradients of rows, and rows on their way to a
trainer that joins."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.equipment.replaced import replaced
from trainer_agent.collective import mean_blocks
from trainer_agent.collective import rows as means_module
from trainer_agent.collective.mean_blocks import MeanStore
from trainer_agent.collective.rows import (
    WHOLE_PLACE,
    MeanRows,
    RowMeans,
    new_rows,
    rows_at,
    step_rows,
    whole_table,
)
from trainer_agent.collective.state import rows as joining
from trainer_agent.collective.state.giving import at_once
from trainer_agent.collective.state.messages import Portion, StateRequest
from trainer_agent.collective.state.rows import JoiningRows, RowsGiver
from trireme_shared.protocol.errors import Gone, InvalidArgument, NotReady
from trireme_shared.protocol.records.layout import Layout, OptimizerSpec, RowInit, RowOptimizer, TableSpec
from trireme_shared.protocol.records.step import LanePosition, StepRecord
from trireme_shared.protocol.wire.messages import TableRequest
from trireme_shared.serving.core.table.rows import RowsPart
from trireme_shared.tables import snapshot
from trireme_shared.tables.payload import ids_in, rows_in

DIM = 2
LAYOUT = Layout(
    segments=(),
    block_bytes=64,
    digest="d",
    optimizer=OptimizerSpec(name="SGD", defaults={}, groups=({"lr": 0.1},)),
    slot_count=8,
    tables=(
        TableSpec(
            name="user",
            dim=DIM,
            optimizer=RowOptimizer(kind="adam", lr=0.1),
            init=RowInit(kind="uniform", scale=0.1),
            admit_after=2,
            seed=3,
        ),
    ),
)
IDS = np.arange(40, dtype=np.int64)


def gradients(ids: np.ndarray, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((len(ids), DIM)).astype(np.float32)


def pushed(rows: MeanRows, step: int, lane: int, ids: np.ndarray) -> None:
    rows.push(step, lane, [ids], [gradients(ids, 10 * step + lane)], 3)


def made(rows: MeanRows) -> None:
    for _ in rows.steps():
        pass


def asked(rows: MeanRows, version: int, slots: int, first: int = 0) -> tuple[Any, memoryview]:
    fields = {"job": "j", "generation": 4, "version": version, "table": 0, "slots": slots, "first": first}
    return rows.portion_of_means(TableRequest.model_validate(fields))


def test_a_share_is_given_when_all_lanes_are_there_and_the_whole_when_all_shares_are():
    rows = MeanRows(LAYOUT, 2, 5)
    pushed(rows, 5, 0, IDS[:10])
    assert not rows.is_whole
    pushed(rows, 5, 1, IDS[5:15])
    made(rows)
    assert rows.version == 6
    assert asked(rows, 6, slots=4)[0].total == 15
    with pytest.raises(Gone, match="made version 6 are not kept"):
        asked(rows, 6, slots=0)
    with pytest.raises(NotReady, match="made version 7 are not there"):
        asked(rows, 7, slots=4)
    rows.complete(6, {1: RowMeans([IDS[20:25]], [gradients(IDS[20:25], 0)], has_data=True)})
    assert asked(rows, 6, slots=0)[0].total == 20
    assert asked(rows, 6, slots=4)[0].total == 15
    assert rows.whole[6].ids[0].tolist() == [*range(15), *range(20, 25)]


def test_a_new_generation_begins_the_step_again_and_keeps_what_is_whole():
    rows = MeanRows(LAYOUT, 2, 5)
    for lane in (0, 1):
        pushed(rows, 5, lane, IDS[:10])
    made(rows)
    rows.complete(6, {})
    for lane in (0, 1):
        pushed(rows, 6, lane, IDS[:10])
    made(rows)
    pushed(rows, 7, 0, IDS[:10])
    rows.start_again(6)
    assert (rows.version, rows.shares, sorted(rows.whole), rows.lanes_there) == (6, {}, [6], frozenset())


def test_a_trainer_that_gave_all_slots_counts_alone():
    rows = MeanRows(LAYOUT, 2, 5)
    whole = RowMeans([IDS[:3]], [gradients(IDS[:3], 0)], has_data=True)
    rows.complete(6, {WHOLE_PLACE: whole})
    assert rows.version == 6
    assert rows.whole[6] is whole


def test_large_means_come_in_several_answers():
    rows = MeanRows(LAYOUT, 1, 0)
    pushed(rows, 0, 0, IDS)
    made(rows)
    with replaced(means_module, "PORTION_BYTES", 100):
        end, payload = asked(rows, 1, slots=4)
    assert (end.rows, end.next, end.total, payload.nbytes) == (6, 6, 40, 96)


def test_answers_have_all_tables_one_after_the_other_and_none_is_left_out():
    tables = tuple(
        LAYOUT.tables[0].model_copy(update={"name": name, "dim": dim})
        for name, dim in (("a", 4), ("b", 1), ("c", 2))
    )
    rows = MeanRows(LAYOUT.model_copy(update={"tables": tables}), 1, 0)
    dims, counts = (4, 1, 2), (3, 40, 5)
    ids = [IDS[:count] for count in counts]
    sent = [
        np.arange(count * dim, dtype=np.float32).reshape(count, dim)
        for count, dim in zip(counts, dims, strict=True)
    ]
    rows.push(0, 0, ids, sent, 3)
    made(rows)
    for most in (1, 60, 100, 1 << 20):
        first, found = 0, [[], [], []]
        with replaced(means_module, "PORTION_BYTES", most):
            while first < 48:
                end, payload = asked(rows, 1, slots=4, first=first)
                parts = zip(
                    ids_in(payload, end.counts, dims, rows=True),
                    rows_in(payload, end.counts, dims, ids=True),
                    strict=True,
                )
                assert 0 < end.rows == end.next - first
                for table, part in zip(found, parts, strict=True):
                    table.append(part)
                first = end.next
        for number, table in enumerate(found):
            assert np.concatenate([part[0] for part in table]).tolist() == ids[number].tolist()
            assert np.concatenate([part[1] for part in table]).tolist() == sent[number].tolist()


def test_small_means_are_those_of_an_answer_and_large_ones_or_those_that_are_not_there_are_none():
    rows = MeanRows(LAYOUT, 1, 0)
    pushed(rows, 0, 0, IDS)
    made(rows)
    end, payload = asked(rows, 1, slots=4)
    found = rows.small_means(1, 4)
    assert found is not None
    assert (found.counts, found.payload, found.has_data) == (end.counts, bytes(payload), True)
    assert rows.small_means(2, 4) is None
    assert rows.small_means(1, 0) is None  # the other shares have not come
    rows.complete(1, {})
    assert rows.small_means(1, 0) == found
    with replaced(means_module, "SMALL_BYTES", len(payload) - 1):
        assert rows.small_means(1, 4) is None


def test_it_says_that_it_has_no_rows():
    rows = MeanRows(LAYOUT, 1, 0)
    with pytest.raises(InvalidArgument, match="each trainer has the rows itself"):
        rows.lookup(0, [IDS])


# ---------------------------------------------------------------- a trainer that joins


def record(version: int) -> StepRecord:
    return StepRecord(version=version, positions=(LanePosition(lane=0),))


def means(version: int) -> RowMeans:
    ids = IDS[version % 7 :: 2].copy()
    return RowMeans([ids], [gradients(ids, version)], has_data=True)


async def donor_at(version: int) -> Any:
    """A replica."""
    rows = new_rows(LAYOUT, 0)
    for step in range(version):
        await step_rows(rows, means(step), None)
    return SimpleNamespace(rows=rows, record=record(version), at_rest=True, timeline=0)


async def stepped(replica: Any) -> None:
    await step_rows(replica.rows, means(replica.record.version), None)
    replica.record = record(replica.record.version + 1)


def request(token: str, portion: int) -> StateRequest:
    return StateRequest(job="j", generation=1, timeline=0, blocks=(), rows=token, portion=portion)


@pytest.fixture(autouse=True)
def small_portions():
    with (
        replaced(joining, "PART_BYTES", 64),
        replaced(snapshot, "GROUP_BYTES", 200),
        replaced(joining, "PAUSE_S", 0.0),
    ):
        yield


def same(one: Any, other: Any) -> bool:
    """Rows, state and counts of ids without a row: also the steps after them have the same bits."""
    tables = one.tables[0], other.tables[0]
    both = [whole_table(each, 0, None) for each in (one, other)]
    return (
        np.array_equal(both[0][0], both[1][0])
        and both[0][1].tobytes() == both[1][1].tobytes()
        and tables[0].updates == tables[1].updates
        and np.array_equal(tables[0].sketch, tables[1].sketch)
    )


async def test_rows_come_at_one_version_while_the_donor_steps_and_the_steps_since_are_made():
    replica = await donor_at(6)
    giver, joiner, compared = RowsGiver(replica, at_once), JoiningRows(LAYOUT, lambda _: None), 0

    async def ask(_: int, token: str, portion: int) -> Portion:
        nonlocal compared
        found = await giver.give(request(token, portion))
        if portion in (1, 3):
            version = replica.record.version
            await stepped(replica)
            await joiner.note(record(version + 1), means(version))
            compared += 1
        return found

    await joiner.fetch(1, ask)
    assert compared == 2
    assert joiner.rows is not None
    assert joiner.are_at(8)
    assert same(joiner.rows, replica.rows)
    await stepped(replica)
    await joiner.note(record(9), means(8))
    assert same(joiner.rows, replica.rows)
    assert not any(each.is_open for each in replica.rows.snapshots)


async def test_rows_of_the_next_version_are_waited_for_until_its_step_or_until_the_job_goes_back():
    replica = await donor_at(2)
    waiting = asyncio.ensure_future(rows_at(lambda: replica.rows, 3, [IDS]))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await stepped(replica)
    assert np.array_equal((await waiting)[0], (await rows_at(lambda: replica.rows, None, [IDS]))[0])
    waiting = asyncio.ensure_future(rows_at(lambda: replica.rows, 4, [IDS]))
    await asyncio.sleep(0.01)
    replica.rows = new_rows(LAYOUT, 0)
    async with asyncio.timeout(5):
        with pytest.raises(Gone, match="while version 4 of its rows was waited for"):
            await waiting


@pytest.mark.parametrize("fault", ["damaged", "twice", "dead"])
async def test_what_goes_wrong_on_the_way_begins_anew(fault):
    replica = await donor_at(5)
    giver, joiner, done = RowsGiver(replica, at_once), JoiningRows(LAYOUT, lambda _: None), []

    async def ask(_: int, token: str, portion: int) -> Portion:
        if portion != 2 or done:
            return await giver.give(request(token, portion))
        done.append(token)
        found = await giver.give(request(token, portion))
        if fault == "twice":  # the answer was lost
            return await giver.give(request(token, portion))
        if fault == "dead":
            giver.close()
            return await giver.give(request(token, portion + 1))
        part, payload = next(each for each in found.parts if each[1].nbytes)
        changed = bytearray(payload)
        changed[20] ^= 1
        return Portion(found.head, [(part, memoryview(changed)), *found.parts[1:]])

    await joiner.fetch(1, ask)
    assert done
    assert joiner.rows is not None
    assert same(joiner.rows, replica.rows)


async def test_a_trainer_whose_versions_pass_too_fast_begins_anew():
    joiner = JoiningRows(LAYOUT, lambda _: None)
    with (
        replaced(joining, "KEPT_BYTES", 500),
        pytest.raises(Gone, match="versions pass faster than rows come"),
    ):
        for version in range(10):
            await joiner.note(record(version + 1), means(version))


async def test_snapshots_that_nobody_asks_for_are_closed():
    replica = await donor_at(5)
    giver = RowsGiver(replica, at_once)
    with replaced(joining, "IDLE_S", 0.01), replaced(joining, "MARGIN_S", 0.01):
        await giver.give(request("first", 0))
        assert sum(each.is_open for each in replica.rows.snapshots) == 1
        await asyncio.sleep(0.1)  # the trainer that asked has died
    assert not any(each.is_open for each in replica.rows.snapshots)
    with pytest.raises(NotReady, match="begin anew"):
        await giver.give(request("first", 1))
    assert not any(each.is_open for each in replica.rows.snapshots)


# ---------------------------------------------------------------- safeguards, and what happens without them


def counts_a_late_duplicate() -> bool:
    """Whether a lane's rows of a step that is made already, pushed again, count in the next step."""
    rows = MeanRows(LAYOUT, 2, 5)
    for lane in (0, 1):
        pushed(rows, 5, lane, IDS[:10])
    made(rows)
    pushed(rows, 5, 0, IDS[:10])
    pushed(rows, 6, 1, IDS[:10])
    return rows.is_whole


def test_rows_that_are_pushed_again_count_once(monkeypatch):
    assert not counts_a_late_duplicate()
    monkeypatch.setattr(RowsPart, "judge", lambda *_: None)
    assert counts_a_late_duplicate()


def gives_the_last_version() -> bool:
    """Whether a trainer that has all of version 7 gives its means to one that has version 6."""
    store = MeanStore("j", LAYOUT, 2, record(5), lambda _: memoryview(b""))
    for version in (6, 7):
        store.complete(version, {}, record(version), {WHOLE_PLACE: means(version)})
    store.in_use = 7
    store.forget()
    assert store.rows is not None
    try:
        return asked(store.rows, 7, slots=0)[0].total > 0
    except Gone:
        return False


def test_means_of_the_last_version_are_kept_for_those_who_lack_it(monkeypatch):
    monkeypatch.setattr(mean_blocks, "KEPT_BYTES", 0)
    assert gives_the_last_version()
    monkeypatch.setattr(MeanStore, "_needed", property(lambda store: store.in_use + 1))
    assert not gives_the_last_version()

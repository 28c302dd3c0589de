"""A parameter server that has rows of tables and no blocks, in a job that clips: it makes no record of a
version before it knows the norm."""

from __future__ import annotations

import math

import pytest
import pytest_asyncio

from tests.equipment.replaced import replaced
from tests.pserver_service.jobs import JOB, init_header, pull_request, pulled, push_header, stream
from tests.shared.serving.table.tables import LAYOUT, ids, pushed_rows, values_in
from trireme_shared.blocks.gradient_norm import Clipping
from trireme_shared.checkpoints.schedule import Schedule
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.layout import ROWS
from trireme_shared.protocol.records.step import NodeResult
from trireme_shared.protocol.wire.messages import PullEnd, StepNorm
from trireme_shared.serving.core.store import Store
from trireme_shared.serving.pserver import Pserver

KEYS = ids(1, 2), ids(7)
NORM = 2.5


async def server_without_blocks() -> Pserver:
    pserver = Pserver(JOB, "ps-1", index=0)
    pserver.clipping, pserver.schedule = Clipping(1.5), Schedule(1, None, 1)
    await pserver.init(init_header(LAYOUT), stream())
    assert pserver.store is not None
    assert pserver.store.numbers == [ROWS]
    first = pserver.store.take_snapshot()
    assert first is not None
    first.release()
    return pserver


async def push(pserver: Pserver, step: int) -> None:
    lanes = [pushed_rows(lane, *KEYS) for lane in range(4)]
    results = [
        (item.model_copy(update={"result": NodeResult(loss_sum=1.0, records=2)}), rows)
        for item, rows in lanes
    ]
    answer = await pserver.push(push_header(step), stream(*results))
    assert answer.applied == 4


@pytest_asyncio.fixture
async def held() -> Pserver:
    """The rows have made step 0."""
    pserver = await server_without_blocks()
    await push(pserver, 0)
    return pserver


async def end_of(pserver: Pserver, version: int, norm: StepNorm | None = None) -> PullEnd:
    _, end = await pulled(pserver, pull_request(version, (), norm=norm, results_from=0))
    return end


def told(norm: float = NORM, step: int = 0, timeline: int = 0) -> StepNorm:
    return StepNorm(timeline=timeline, step=step, norm=norm)


def saved(pserver: Pserver) -> list[tuple[int, float | None]]:
    """Version and norm of the snapshot that waits."""
    assert pserver.store is not None
    snapshot = pserver.store.take_snapshot()
    found = [] if snapshot is None else [(snapshot.version, snapshot.record.grad_norm)]
    if snapshot is not None:
        snapshot.release()
    return found


async def test_rows_are_read_at_once_and_the_versions_record_is_made_with_the_norm(held: Pserver) -> None:
    assert held.store is not None
    assert held.store.rows is not None
    assert values_in(held.store.rows.lookup(1, KEYS), 2, 1) == [[[-0.5, -0.5]] * 2, [[-0.5] * 3]]
    end = await end_of(held, 1)
    assert (end.code, end.squares, end.record) == ("HELD", (), None)
    assert (await end_of(held, 0)).code == "OK"
    assert saved(held) == []
    end = await end_of(held, 1, told())
    assert end.record is not None
    assert end.record.result is not None
    norms = [
        end.record.grad_norm,
        end.record.result.grad_norm,
        *(each.grad_norm for each in end.results or ()),
    ]
    assert (end.code, norms) == ("OK", [NORM] * 3)
    assert saved(held) == [(1, NORM)]
    assert (await end_of(held, 1)).record == end.record
    await push(held, 1)
    assert (await end_of(held, 2)).code == "HELD"
    assert (await end_of(held, 2, told(3.0, step=1))).code == "OK"
    assert saved(held) == [(2, 3.0)]


async def test_a_norm_of_another_step_or_timeline_is_none_and_the_first_one_counts(held: Pserver) -> None:
    for other in (told(step=1), told(step=-1), told(timeline=3)):
        assert (await end_of(held, 1, other)).code == "HELD"
    with pytest.raises(InvalidArgument, match="norm of the gradient of step 0"):
        await end_of(held, 1, told(math.nan))
    assert (await end_of(held, 1, told())).code == "OK"
    again = (await end_of(held, 1, told(9.0))).record
    assert again is not None
    assert again.grad_norm == NORM


@pytest.mark.parametrize("made", [False, True])
async def test_what_another_parameter_server_hands_over_has_the_norm_too(held: Pserver, made: bool) -> None:
    """A resize: the record, which was made elsewhere, comes while the rows here wait for the norm; or only
    the norm does."""
    source = await server_without_blocks()
    await push(source, 0)
    assert held.store is not None
    assert source.store is not None
    if made:
        assert (await end_of(source, 1, told())).code == "OK"
    else:
        source.store.history.learn_norm(0, NORM)
    held.store.history.take(source.store.history.handed())
    record = (await end_of(held, 1)).record
    assert record is not None
    assert record.grad_norm == NORM


async def test_without_the_wait_a_version_has_a_record_without_a_norm() -> None:
    """An ablation."""

    def at_once(store: Store) -> bool:
        assert store.rows is not None
        store.stepped(store.rows)
        return True

    with replaced(Store, "settle_rows", at_once):
        pserver = await server_without_blocks()
        await push(pserver, 0)
        end = await end_of(pserver, 1)
    assert end.code == "OK"
    assert end.record is not None
    assert end.record.grad_norm is None
    assert saved(pserver) == [(1, None)]

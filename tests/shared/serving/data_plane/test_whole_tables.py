"""A whole table, some slots at a time, over plain requests; what is refused; and the metrics of tables."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.equipment.metric_names import wrong_metrics
from tests.pserver_service.jobs import JOB, layout_of
from tests.shared.serving.data_plane.servers import Server, server
from trireme_shared.protocol.errors import CallerError, Gone, NotReady, WrongOwner
from trireme_shared.protocol.records import SlotMap
from trireme_shared.protocol.records.layout import RowInit, RowOptimizer, TableSpec
from trireme_shared.protocol.wire.messages import TableRequest
from trireme_shared.serving.core.table import rows
from trireme_shared.serving.data_plane.server import Collector
from trireme_shared.tables.payload import ids_in, rows_in

__all__ = ["server"]
IDS = np.arange(-50, 50)
INIT = RowInit(kind="uniform", scale=0.1)


def table(name: str, **fields) -> TableSpec:
    return TableSpec(name=name, dim=3, init=INIT, optimizer=RowOptimizer(kind="adam", lr=0.1), **fields)


async def filled(server: Server) -> None:
    layout = layout_of(40).model_copy(
        update={"tables": (table("a"), table("b", evict_after_steps=1)), "slot_count": 16}
    )
    await server.initialise(layout, lanes=1)
    step(server, IDS, IDS)


def step(server: Server, *ids: np.ndarray) -> None:
    store = server.pserver.store
    gradients = [np.ones((len(some), 3), np.float32) for some in ids]
    store.rows.push(store.rows.version, 0, ids, gradients, 4)
    for _ in store.rows.steps():
        pass


def request(**fields) -> TableRequest:
    return TableRequest(**{"job": JOB, "generation": 0, "version": 1, "table": 0, **fields})


async def read(server: Server, **fields) -> tuple[int, np.ndarray, np.ndarray]:
    """How many answers, and what is in them."""
    found, slot, part = [], 0, 0
    while slot < 16:
        end, payload = await server.client.table(request(first=slot, part=part, **fields))
        found.append(
            (ids_in(payload, [end.rows], [3], rows=True)[0], rows_in(payload, [end.rows], [3], ids=True)[0])
        )
        slot, part = end.next, end.part
    ids, values = (np.concatenate(each) for each in zip(*found, strict=True))
    order = np.argsort(ids)
    return len(found), ids[order], values[order]


@pytest.mark.parametrize(("most_bytes", "least"), [(600, 3), (60, 30)])
async def test_the_answers_together_are_the_table_also_where_a_slot_is_more_than_one(
    server, monkeypatch, most_bytes, least
):
    monkeypatch.setattr(rows, "PORTION_BYTES", most_bytes)
    await filled(server)
    answers, ids, values = await read(server)
    assert answers > least
    expected = np.empty((100, 3), np.float32)
    server.pserver.store.rows.tables[0].lookup(IDS, expected)
    assert np.array_equal(ids, IDS)
    assert np.array_equal(values, expected)
    end, payload = await server.client.table(request(first=16))
    assert (end.total, end.rows, end.next, len(payload)) == (100, 0, 16, 0)


async def test_expired_rows_are_left_out(server):
    await filled(server)
    for _ in range(2):
        step(server, IDS[:1], IDS[:7])
    _, ids, _ = await read(server, version=3, table=1)
    assert np.array_equal(ids, IDS[:7])
    assert len((await read(server, version=3))[1]) == 100


async def test_a_job_without_tables_has_none_to_read(server):
    await server.initialise(lanes=1)
    with pytest.raises(CallerError, match="rows were asked for in a job without embedding tables"):
        await server.client.table(request())


async def test_requests_of_the_past_the_future_and_other_maps_are_refused(server):
    await filled(server)
    with pytest.raises(NotReady, match="have not reached version 2"):
        await server.client.table(request(version=2))
    with pytest.raises(Gone, match="at version 1, 0 was asked"):
        await server.client.table(request(version=0))
    with pytest.raises(CallerError, match="table 2 was asked for: the model has 2"):
        await server.client.table(request(table=2))
    server.pserver.store.slots = SlotMap(version=5, owners=(0,) * 16)
    with pytest.raises(WrongOwner, match="slot map 4 is old"):
        await server.client.table(request(slots=4))
    server.pserver.timeline = 3
    with pytest.raises(NotReady, match="rolled back in generation 3, this is of 2"):
        await server.client.table(request(generation=2))
    assert (await server.client.info()).ready


async def test_metrics_tell_of_each_table(server):
    await filled(server)
    step(server, IDS[:2], IDS[:2])
    step(server, IDS[:2], IDS[:2])
    step(server, IDS[:2], IDS[3:5])
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(server.pserver))
    text = generate_latest(registry).decode()
    assert wrong_metrics(text) == []
    rows_of_b = server.pserver.store.rows.tables[1].rows  # some expired ones have left
    for line in (
        'table_rows{table="a"} 100.0',
        f'table_rows{{table="b"}} {rows_of_b}.0',
        'table_admitted_rows_total{table="a"} 100.0',
        'table_admitted_rows_total{table="b"} 102.0',
        f'table_evicted_rows_total{{table="b"}} {102 - rows_of_b}.0',
        'table_refused_gradients_total{table="a"} 0.0',
    ):
        assert f"trireme_pserver_{line}\n" in text
    assert 'trireme_pserver_table_bytes{table="a"}' in text

"""Parameter servers with embedding tables, in a cluster on the virtual loop, and what their rows have to
be."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from tests.pserver_service.checkpoints import parts
from tests.pserver_service.checkpoints.cluster import Node, PserverCluster
from trireme_shared.protocol.records.layout import ROWS, RowInit, RowOptimizer, TableSpec
from trireme_shared.protocol.wire.messages import PushBlock
from trireme_shared.serving.core.store import Store
from trireme_shared.tables.hashing import owned_slots, slots_of
from trireme_shared.tables.lanes import LaneRows, mean_over_lanes
from trireme_shared.tables.payload import joined as payload_of
from trireme_shared.tables.snapshot import to_records
from trireme_shared.tables.table import Table, joined

INIT = RowInit(kind="uniform", scale=0.1)
ADAM, ADAGRAD = RowOptimizer(kind="adam", lr=0.1), RowOptimizer(kind="adagrad", lr=0.1)
SPECS = (
    TableSpec(name="item", dim=3, seed=5, optimizer=ADAM, init=INIT, max_rows=512, evict_after_steps=7),
    TableSpec(name="user", dim=16, seed=6, optimizer=ADAGRAD, init=INIT, admit_after=2),
)
LAYOUT = parts.layout_of(elements=16).model_copy(update={"tables": SPECS})
MANY, FEW = 6000, 40


@cache
def ids_of(step: int, lane: int) -> tuple[np.ndarray, ...]:
    """Of each table: of users many in the first two steps, then a few, of which some are new."""
    rng = np.random.default_rng(1000 * step + lane)
    users = np.arange(MANY) if step < 2 else np.unique(rng.integers(0, 2 * MANY, FEW))
    return np.unique(rng.integers(-1000, 2000, FEW)), users


def gradients_of(step: int, lane: int, spec: TableSpec, ids: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(step + lane)
    return rng.standard_normal((len(ids), spec.dim)).astype(np.float32)


@cache
def expected_rows(step: int) -> bytes:
    """All rows, sketches and counts of a job that nothing disturbs."""
    tables = [Table(spec, LAYOUT.slot_count) for spec in SPECS]
    for done in range(step):
        for number, table in enumerate(tables):
            lanes = []
            for lane in range(parts.LANES):
                ids = ids_of(done, lane)[number]
                lanes.append(LaneRows(ids, gradients_of(done, lane, table.spec, ids), 3 + lane))
            table.step(*mean_over_lanes(lanes, table.spec.dim))
    return b"".join(_content([table]) for table in tables)


def rows_in(stores: list[Store]) -> bytes:
    """As expected_rows."""
    return b"".join(_content([store.rows.tables[number] for store in stores]) for number in range(len(SPECS)))


def _content(tables: list[Table]) -> bytes:
    rows = to_records(
        joined([table.read_slot(slot) for table in tables for slot in table.slots()], tables[0].width)
    )
    [updates] = {table.updates for table in tables}
    sketch = (
        b""
        if tables[0].sketch is None
        else np.bitwise_or.reduce([table.sketch for table in tables]).tobytes()
    )
    return rows.tobytes() + sketch + str(updates).encode()


class TableCluster(PserverCluster):
    def __init__(self, storage: str, pservers: int = 2, **spec: Any) -> None:
        super().__init__(storage, pservers, LAYOUT, **{"checkpoint_every_steps": 1, **spec})

    def items(self, node: Node, step: int, lane: int) -> list[tuple[PushBlock, Any]]:
        ids, rows = [], []
        for spec, every in zip(SPECS, ids_of(step, lane), strict=True):
            own = owned_slots(self.slots.owners, node.pserver.index)[
                slots_of(every, spec.seed, LAYOUT.slot_count)
            ]
            ids.append(every[own])
            rows.append(gradients_of(step, lane, spec, every)[own])
        counts = tuple(len(some) for some in ids)
        of_rows = PushBlock(block=ROWS, lanes=(lane, lane + 1), count=3 + lane, rows=counts)
        return [*super().items(node, step, lane), (of_rows, payload_of(ids, rows))]

    async def checkpointed(self, first: int, last: int) -> None:
        """Steps [first, last), each with its checkpoint."""
        for step in range(first, last):
            await self.train(step, step + 1)
            await self.committed(step + 1)

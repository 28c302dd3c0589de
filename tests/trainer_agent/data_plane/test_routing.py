"""Which parameter server holds which blocks."""

from __future__ import annotations

from trainer_agent.data_plane.fleet_client import route
from trireme_shared.protocol.records import SlotMap
from trireme_shared.protocol.records.assignments import spread
from trireme_shared.protocol.records.layout import Layout, OptimizerSpec, Segment


def test_blocks_are_routed_by_slot():
    layout = Layout(
        segments=(Segment(kind="param", dtype="float32", elements=64 * 5, group=0),),
        block_bytes=256,
        digest="",
        optimizer=OptimizerSpec(name="SGD", defaults={}, groups=({},)),
        slot_count=128,
    )
    routes = route(layout, SlotMap(version=3, owners=spread(128, 2)))
    assert (routes.version, routes.owners, routes.blocks) == (3, (0, 1, 0, 1, 0), {0: (0, 2, 4), 1: (1, 3)})

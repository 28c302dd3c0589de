"""Blocks by arithmetic are the blocks that trainers enumerate."""

from hypothesis import given
from hypothesis import strategies as st

from tests.pserver_service.jobs import layout_of
from trireme_shared.protocol.records.layout import Segment
from trireme_shared.serving.core.geometry import Geometry

segments = st.lists(
    st.tuples(st.sampled_from(["float32", "bfloat16", "int64"]), st.integers(1, 500)), min_size=1, max_size=5
)


@given(segments, st.sampled_from([64, 128, 448]))
def test_every_number_has_the_block_of_the_layout(sizes, block_bytes):
    made = [Segment(kind="buffer", dtype=dtype, elements=elements) for dtype, elements in sizes]
    layout = layout_of(*made, block_bytes=block_bytes)
    geometry = Geometry(layout)
    expected = list(layout.blocks())
    assert [geometry.block(number) for number in range(geometry.blocks)] == expected
    assert geometry.block(-1) is geometry.block(len(expected)) is None

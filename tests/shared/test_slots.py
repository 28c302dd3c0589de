"""Blocks cover the flat vectors exactly; slots spread them evenly."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shared.records.layout import ELEMENT_BYTES, Layout, OptimizerSpec, Segment
from shared.slots import slot_of, spread

OPTIMIZER = OptimizerSpec(name="SGD", defaults={"lr": 0.1}, groups=({"lr": 0.1},))


@given(st.lists(st.tuples(st.sampled_from(sorted(ELEMENT_BYTES)), st.integers(1, 5000)), min_size=1, max_size=4))
def test_blocks_cover_every_element_once_and_are_numbered_densely(parts: list[tuple[str, int]]) -> None:
    segments = tuple(Segment(kind="param", dtype=dtype, elements=n, group=0) for dtype, n in parts)
    blocks = list(Layout(segments=segments, block_bytes=1024, digest="", optimizer=OPTIMIZER).blocks())
    assert [block.number for block in blocks] == list(range(len(blocks)))
    assert all(0 < block.bytes <= 1024 for block in blocks)
    for index, segment in enumerate(segments):
        own = [block for block in blocks if block.segment == index]
        assert [e for b in own for e in range(b.first, b.first + b.elements)] == list(range(segment.elements))


def test_neighbouring_blocks_go_to_different_pservers() -> None:
    owners = spread(1024, 3)
    share = Counter(owners[slot_of(block, 1024)] for block in range(30))
    assert share == {0: 10, 1: 10, 2: 10}

"""Blocks cover the flat vectors exactly; slots spread them evenly."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from trireme_shared.protocol.records.assignments import blocks_in, rebalanced, slot_of, spread
from trireme_shared.protocol.records.layout import ELEMENT_BYTES, Layout, OptimizerSpec, Segment

OPTIMIZER = OptimizerSpec(name="SGD", defaults={"lr": 0.1}, groups=({"lr": 0.1},))


@given(
    st.lists(st.tuples(st.sampled_from(sorted(ELEMENT_BYTES)), st.integers(1, 5000)), min_size=1, max_size=4)
)
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


def test_growing_and_shrinking_moves_as_few_bytes_as_an_even_share_needs() -> None:
    one, two = spread(128, 1), spread(128, 2)
    assert Counter(rebalanced(one, [4] * 128, 2)) == {0: 64, 1: 64}
    grown = rebalanced(two, [4] * 128, 3)
    assert sorted(Counter(grown).values()) == [42, 43, 43]
    assert sum(before != after for before, after in zip(two, grown, strict=True)) == 42
    assert rebalanced(grown, [4] * 128, 3) == grown
    shrunk = rebalanced(grown, [4] * 128, 2)
    assert {before for before, after in zip(grown, shrunk, strict=True) if before != after} == {2}
    assert Counter(shrunk) == {0: 64, 1: 64}


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=8, max_size=40),
    st.integers(1, 6),
)
def test_after_a_resize_every_slot_has_an_owner_that_stays_and_no_single_move_would_be_fairer(
    slots: list[tuple[int, int]], pservers: int
) -> None:
    owners, weights = [owner for owner, _ in slots], [weight for _, weight in slots]
    new = rebalanced(owners, weights, pservers)
    assert len(new) == len(owners)
    assert set(new) <= set(range(pservers))
    loads = [sum(w for w, owner in zip(weights, new, strict=True) if owner == i) for i in range(pservers)]
    gap = max(loads) - min(loads)
    heaviest = loads.index(max(loads))
    assert not any(0 < 2 * w <= gap for w, owner in zip(weights, new, strict=True) if owner == heaviest)
    assert all(new[slot] == owner for slot, (owner, w) in enumerate(slots) if owner < pservers and not w)


def test_the_blocks_of_slots_are_found_by_arithmetic() -> None:
    assert blocks_in({1, 3}, 10, 4) == [1, 3, 5, 7, 9]
    assert blocks_in(range(4), 10, 4) == list(range(10))
    assert blocks_in({7}, 5, 8) == []

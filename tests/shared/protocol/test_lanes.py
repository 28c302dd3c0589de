"""The canonical tree: the same bits for every assignment of lanes, and plain PyTorch's bits for one lane."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from trireme_shared.protocol.lanes import aligned_intervals, combine, is_aligned, parent, sibling, step_seed

LANES = 16


@given(st.integers(0, LANES), st.integers(0, LANES))
def test_aligned_intervals_cover_exactly_and_are_nodes(a: int, b: int) -> None:
    first, last = sorted((a, b))
    nodes = aligned_intervals(first, last)
    assert [lane for node in nodes for lane in range(*node)] == list(range(first, last))
    assert all(is_aligned(*node) for node in nodes)


@given(st.integers(0, LANES - 1), st.integers(0, LANES))
def test_aligned_intervals_are_the_fewest(a: int, b: int) -> None:
    first, last = sorted((a, b))
    nodes = aligned_intervals(first, last)
    assert not any(sibling(left) == right for left, right in itertools.pairwise(nodes))


def test_siblings_share_a_parent() -> None:
    for size in (1, 2, 4, 8):
        for first in range(0, LANES, size):
            node = (first, first + size)
            assert sibling(sibling(node)) == node
            assert parent(node) == parent(sibling(node))
            assert is_aligned(*parent(node))


def _tree(values: list[torch.Tensor], counts: list[int], first: int, last: int) -> tuple[torch.Tensor, int]:
    if last - first == 1:
        return values[first].clone(), counts[first]
    middle = (first + last) // 2
    return combine(*_tree(values, counts, first, middle), *_tree(values, counts, middle, last))


@given(st.lists(st.integers(0, 9), min_size=8, max_size=8), st.integers(0, 2**31))
def test_combine_gives_the_weighted_mean(counts: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(5, generator=generator) for _ in counts]
    mean, total = _tree(values, counts, 0, 8)
    assert total == sum(counts)
    if total:
        expected = sum(v.double() * n for v, n in zip(values, counts, strict=True)) / total
        assert torch.allclose(mean.double(), expected, atol=1e-5)


def test_combine_gives_the_same_bits_for_every_cut_into_blocks() -> None:
    left, right = torch.randn(1001), torch.randn(1001)
    whole, _ = combine(left.clone(), 3, right.clone(), 5)
    parts = [combine(left[i : i + 7].clone(), 3, right[i : i + 7].clone(), 5)[0] for i in range(0, 1001, 7)]
    assert torch.equal(whole, torch.cat(parts))


def test_combine_leaves_the_other_side_of_an_empty_one_untouched() -> None:
    value = torch.randn(4)
    assert combine(torch.full((4,), 9.0), 0, value, 2) == (value, 2)
    assert combine(value, 2, torch.full((4,), 9.0), 0) == (value, 2)


def test_combine_takes_the_first_lane_with_data_for_integers() -> None:
    left, right = torch.tensor([7]), torch.tensor([9])
    assert combine(left, 2, right, 3) == (left, 5)
    assert combine(left, 0, right, 3) == (right, 3)


def test_step_seeds_differ_by_each_of_their_parts() -> None:
    seeds = {step_seed(s, t, lane) for s in range(5) for t in range(50) for lane in range(8)}
    assert len(seeds) == 5 * 50 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)

"""Means of buffers: equal bits stay, whatever they say; all else is the weighted mean."""

from __future__ import annotations

import math

import pytest
import torch

from trireme_shared.blocks.buffer_mean import add_changes, bits_of, combine_buffers, first_lane, mean_of
from trireme_shared.protocol.lanes import combine

COUNTS = [(1, 1), (3, 2), (0, 4), (4, 0)]


@pytest.mark.parametrize(("left", "right"), COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_bits_stay(dtype, left, right):
    kept = torch.tensor([math.inf, -math.inf, math.nan, torch.finfo(dtype).min, 0.1, -0.0, 0.0], dtype=dtype)
    mean, count = combine_buffers(kept.clone(), left, kept.clone(), right)
    assert count == left + right
    assert torch.equal(bits_of(mean), bits_of(kept))


@pytest.mark.parametrize(("left", "right"), COUNTS)
def test_others_are_means(left, right):
    one, other = torch.randn(50), torch.randn(50)
    expected, _ = combine(one.clone(), left, other.clone(), right)
    mean, _ = combine_buffers(one.clone(), left, other.clone(), right)
    assert torch.equal(mean, expected)


def test_integers_are_those_of_the_first_lane_or_are_added():
    one, other = torch.arange(3), torch.full((3,), 5)
    assert combine_buffers(one.clone(), 2, other.clone(), 3)[0].tolist() == [0, 1, 2]
    assert add_changes(one.clone(), 2, other.clone(), 3)[0].tolist() == [5, 6, 7]
    assert add_changes(one.clone(), 0, other.clone(), 3)[0].tolist() == [5, 5, 5]


def test_each_kind_of_segment_has_its_rule_and_an_unknown_one_none():
    assert [mean_of(kind) for kind in ("param", "buffer", "first")] == [combine, combine_buffers, first_lane]
    one, other = torch.randn(5), torch.randn(5)
    assert first_lane(one, 2, other, 3) == (one, 5)
    assert first_lane(one, 0, other, 3) == (other, 3)
    assert first_lane(one, 2, other, 0) == (one, 2)
    with pytest.raises(KeyError):
        mean_of("last")

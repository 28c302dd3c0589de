"""The norm of a gradient out of its blocks: exact, and of the same bits in every order and with any number of
threads."""

from __future__ import annotations

import math
import random

import pytest
import torch

from trireme_shared.blocks.gradient_norm import clip_factor, norm_of, squares_of


@pytest.mark.parametrize("elements", [1, 63, 64, 65, 1000, 40_000, 300_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_of_squares_is_exact_to_seven_digits(elements, dtype):
    values = torch.randn(elements, generator=torch.Generator().manual_seed(elements)).to(dtype)
    assert squares_of(values) == pytest.approx(values.double().square().sum().item(), rel=3e-7)


def test_threads_and_places_in_memory_change_no_bit():
    threads = torch.get_num_threads()
    values, found = torch.randn(2_200_007, generator=torch.Generator().manual_seed(1)), set()
    try:
        for number in (1, 2, 3, 4):
            torch.set_num_threads(number)
            for offset in (0, 1, 3):
                elsewhere = torch.empty(len(values) + offset)[offset:]
                found.add(squares_of(elsewhere.copy_(values)))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1


def test_the_order_of_blocks_changes_no_bit_as_it_would_in_an_ordinary_sum():
    rng = random.Random(3)
    squares = [rng.random() * 10.0 ** rng.randrange(-12, 12) for _ in range(300)]
    orders = [rng.sample(squares, len(squares)) for _ in range(20)]
    assert len({norm_of(order) for order in orders}) == 1
    assert len({sum(order) for order in orders}) > 1


def test_squares_that_float32_cannot_hold_are_added_all_the_same():
    assert squares_of(torch.full((100,), 1e30)) == pytest.approx(1e62, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_show_in_the_norm(bad):
    values = torch.ones(200)
    values[70] = bad
    norm = norm_of([4.0, squares_of(values)])
    assert math.isnan(norm) if math.isnan(bad) else norm == math.inf
    assert math.isnan(norm_of([math.inf, math.nan]))


@pytest.mark.parametrize("norm", [0.0, 0.5, 1.0, 3.7, 1e20, math.inf, math.nan])
def test_the_factor_is_that_of_plain_pytorch(norm):
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.nn.utils.clip_grads_with_norm_([parameter], 1.0, torch.tensor(norm))
    factor = clip_factor(norm, 1.0)
    assert factor == pytest.approx(parameter.grad.item(), rel=1e-6, nan_ok=True)
    assert math.isnan(factor) or factor == torch.tensor(factor).item()

"""A parameter server that clips: whole gradients are held until the norm of all of them is known, whoever
tells it."""

from __future__ import annotations

import math

import pytest
import pytest_asyncio
import torch

from tests.pserver_service.jobs import (
    JOB,
    PLAIN,
    check_invariants,
    init_header,
    item,
    layout_of,
    payload_of,
    pull_request,
    pulled,
    push_header,
    stream,
    values_of,
)
from trireme_shared.blocks.gradient_norm import Clipping, clip_factor, norm_of, squares_of
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.layout import Segment
from trireme_shared.protocol.wire.messages import InitBlock, StepNorm
from trireme_shared.serving.pserver import Pserver

# 16, 16, 8; 8 of buffers
LAYOUT = layout_of(40, Segment(kind="buffer", dtype="float32", elements=8), optimizer=PLAIN)
LIMIT = 1.5
GRADIENTS = {
    0: torch.linspace(-1, 1, 16),
    1: torch.full((16,), 0.25),
    2: torch.full((8,), -2.0),
    3: torch.full((8,), 7.0),
}
NORM = norm_of(squares_of(GRADIENTS[number]) for number in range(3))


async def clipping_pserver(on_nonfinite="fail"):
    pserver = Pserver(JOB, "ps-1", index=0)
    pserver.clipping = Clipping(LIMIT, on_nonfinite)
    values = values_of(LAYOUT)
    items = [(InitBlock(block=number), payload_of(value)) for number, value in values.items()]
    await pserver.init(init_header(LAYOUT), stream(*items))
    return pserver, values


@pytest_asyncio.fixture
async def held():
    """All data of step 0 is there."""
    pserver, values = await clipping_pserver()
    answer = await push_all(pserver)
    assert answer.applied == 4
    yield pserver, values
    check_invariants(pserver)


async def push_all(pserver, step=0, gradients=GRADIENTS):
    blocks = [item(number, gradient.clone()) for number, gradient in gradients.items()]
    return await pserver.push(push_header(step, options=({"lr": 1.0},)), stream(*blocks))


def told(norm=NORM, step=0, timeline=0):
    return pull_request(1, range(4), norm=StepNorm(timeline=timeline, step=step, norm=norm))


async def test_a_whole_gradient_is_held_and_its_squares_are_told(held):
    pserver, values = held
    found, end = await pulled(pserver, pull_request(1, range(4)))
    assert (found, end.code) == ({}, "HELD")
    assert dict(end.squares) == {number: squares_of(GRADIENTS[number]) for number in range(3)}
    found, end = await pulled(pserver, pull_request(0, range(4)))
    assert end.code == "OK"
    assert all(torch.equal(found[number], values[number]) for number in values)


async def test_the_norm_steps_what_is_held_with_one_rounded_factor(held):
    pserver, values = held
    found, end = await pulled(pserver, told())
    assert (end.code, end.record.grad_norm) == ("OK", NORM)
    factor = clip_factor(NORM, LIMIT)
    assert factor < 1
    for number in range(3):
        assert torch.equal(found[number], values[number] - GRADIENTS[number] * factor), number
    assert torch.equal(found[3], GRADIENTS[3])  # a buffer is no gradient
    again, end = await pulled(pserver, pull_request(1, range(4)))
    assert (len(again), end.code) == (4, "OK")


async def test_a_push_of_what_is_held_is_a_duplicate(held):
    answer = await push_all(held[0])
    assert (answer.applied, answer.duplicate) == (0, 4)


async def test_the_first_norm_counts_and_one_of_another_step_or_timeline_does_not(held):
    pserver, _ = held
    for other in (told(9.0, step=1), told(9.0, timeline=3)):
        assert (await pulled(pserver, other))[1].code == "HELD"
    part = pull_request(1, [0], norm=StepNorm(timeline=0, step=0, norm=NORM))
    assert (await pulled(pserver, part))[1].record.grad_norm == NORM
    assert (await pulled(pserver, told(9.0)))[1].record.grad_norm == NORM


async def test_a_pull_waits_while_data_is_missing(held):
    pserver, _ = held
    await pulled(pserver, told())
    one = {0: torch.ones(16)}
    await push_all(pserver, 1, one)
    _, end = await pulled(pserver, pull_request(2, range(4)))
    assert end.code == "TOO_EARLY"
    _, end = await pulled(pserver, pull_request(2, [0]))
    assert (end.code, end.squares) == ("HELD", ((0, 16.0),))
    await push_all(
        pserver, 1, {number: torch.zeros_like(values) for number, values in GRADIENTS.items() if number}
    )
    _, end = await pulled(pserver, pull_request(2, range(4)))
    assert end.code == "HELD"


@pytest.mark.parametrize("norm", [math.nan, math.inf, -1.0])
async def test_a_norm_that_is_none_is_refused(held, norm):
    pserver, _ = held
    with pytest.raises(InvalidArgument, match="norm of the gradient of step 0"):
        await pulled(pserver, told(norm))
    assert (await pulled(pserver, told()))[1].code == "OK"


@pytest.mark.parametrize("on_nonfinite", ["skip", "ignore"])
async def test_a_norm_that_is_not_finite_follows_the_jobs_setting(on_nonfinite):
    pserver, values = await clipping_pserver(on_nonfinite)
    await push_all(pserver)
    found, end = await pulled(pserver, told(math.inf))
    assert (end.code, end.record.version) == ("OK", 1)
    for number in range(3):  # infinity: the factor is 0, and so is a step that is left out
        assert torch.equal(found[number], values[number])
    assert torch.equal(found[3], values[3] if on_nonfinite == "skip" else GRADIENTS[3])
    await push_all(pserver, 1)
    found, _ = await pulled(
        pserver, pull_request(2, range(4), norm=StepNorm(timeline=0, step=1, norm=math.nan))
    )
    assert all(bool(found[number].isnan().all()) is (on_nonfinite == "ignore") for number in range(3))
    check_invariants(pserver)

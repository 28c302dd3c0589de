"""Two trainers push the same lane, because one of them is late: it counts once, and who came first is
known."""

from __future__ import annotations

import pytest
import torch

from tests.pserver_service.jobs import initialised, item, layout_of, push_header, stream
from trireme_shared.protocol.lanes import combine

LAYOUT = layout_of(24, block_bytes=64)  # two blocks
LANES = {lane: torch.full((24,), float(lane + 1)) for lane in range(4)}


def mean(first: int, last: int) -> torch.Tensor:
    if last - first == 1:
        return LANES[first].clone()
    middle = (first + last) // 2
    both, _ = combine(mean(first, middle), middle - first, mean(middle, last), last - middle)
    return both


async def push(pserver, trainer, first, last, step=0):
    blocks = [
        item(block.number, mean(first, last)[: block.elements], (first, last), last - first)
        for block in LAYOUT.blocks()
    ]
    return await pserver.push(push_header(step, range(first, last), trainer=trainer), stream(*blocks))


async def parameters(pserver):
    return torch.cat([torch.tensor(state.current.tensor) for state in pserver.store.blocks.values()])


@pytest.mark.parametrize(
    "order",
    [
        [("a", 0, 2), ("helper", 2, 3), ("helper", 3, 4), ("late", 2, 4)],
        [("a", 0, 2), ("helper", 3, 4), ("late", 2, 4)],
        [("a", 0, 2), ("late", 2, 4), ("helper", 2, 3)],
        [("helper", 2, 3), ("late", 2, 4), ("helper", 3, 4), ("a", 0, 2)],
    ],
)
@pytest.mark.filterwarnings("ignore:To copy construct")
async def test_whoever_comes_first_the_bits_are_those_of_one_push(order):
    once, _ = await initialised(LAYOUT)
    await push(once, "alone", 0, 4)
    pserver, _ = await initialised(LAYOUT)
    for trainer, first, last in order:
        answer = await push(pserver, trainer, first, last)
        assert answer.refused == ()
        assert answer.applied + answer.duplicate == 2
    assert (await pserver.info()).lowest == 1
    assert torch.equal(await parameters(pserver), await parameters(once))


async def test_the_second_push_of_a_lane_is_a_duplicate():
    pserver, _ = await initialised(LAYOUT)
    assert (await push(pserver, "helper", 2, 3)).applied == 2
    answer = await push(pserver, "late", 2, 3)
    assert (answer.applied, answer.duplicate, answer.first) == (0, 2, ())


async def test_each_lane_is_credited_to_one_trainer_also_when_an_answer_is_repeated_after_the_step():
    pserver, _ = await initialised(LAYOUT)
    assert (await push(pserver, "helper", 3, 4)).first == (3,)
    assert (await push(pserver, "late", 2, 4)).first == (2,)
    assert (await push(pserver, "a", 0, 2)).first == (0, 1)
    for trainer, lanes, credited in (("late", (2, 4), (2,)), ("helper", (3, 4), (3,)), ("a", (0, 2), (0, 1))):
        again = await push(pserver, trainer, *lanes)
        assert (again.applied, again.duplicate, again.first) == (0, 2, credited)


async def test_a_parameter_server_tells_which_lanes_some_block_lacks():
    pserver, _ = await initialised(LAYOUT)
    assert (await pserver.info()).missing == ((0, 4),)
    await push(pserver, "a", 1, 2)
    assert (await pserver.info()).missing == ((0, 1), (2, 4))
    only_one_block = item(0, mean(2, 4)[:16], (2, 4), 2)
    await pserver.push(push_header(0, range(2, 4), trainer="b"), stream(only_one_block))
    assert (await pserver.info()).missing == ((0, 1), (2, 4)), "the other block lacks them"
    await push(pserver, "b", 2, 4)
    assert (await pserver.info()).missing == ((0, 1),)
    await push(pserver, "a", 0, 1)
    info = await pserver.info()
    assert (info.lowest, info.missing) == (1, ((0, 4),))

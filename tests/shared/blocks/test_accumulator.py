"""The canonical tree: the same bits whatever the order and the cut of what arrives, and no memory but what
waits."""

import random
from itertools import pairwise, permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme_shared.blocks.buffer_mean import first_lane
from trireme_shared.blocks.buffers import BufferPool
from trireme_shared.protocol.lanes import combine
from trireme_shared.serving.core.blocks import Accumulator

LANES, FOUR, ELEMENTS = 16, 4, 7


def lane(number: int) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(number))


def node(first: int, last: int, counts: list[int]) -> tuple[torch.Tensor, int]:
    if last - first == 1:
        return lane(first), counts[first]
    middle = (first + last) // 2
    return combine(*node(first, middle, counts), *node(middle, last, counts))


def random_cut(rng: random.Random, first: int, last: int) -> list[tuple[int, int]]:
    if last - first == 1 or rng.random() < 0.3:
        return [(first, last)]
    middle = (first + last) // 2
    return random_cut(rng, first, middle) + random_cut(rng, middle, last)


def check(accumulator: Accumulator, pool: BufferPool) -> None:
    held = sum(entry.buffer.view.nbytes for entry in accumulator.nodes.values() if entry.buffer is not None)
    assert held + pool.free_bytes == pool.allocated_bytes
    nodes = sorted(accumulator.nodes)
    assert all(one[1] <= other[0] for one, other in pairwise(nodes)), "nodes overlap"


@settings(max_examples=150)
@given(st.integers(0, 10**9), st.lists(st.integers(0, 3), min_size=LANES, max_size=LANES))
def test_any_order_and_any_cut_give_the_bits_of_the_tree(seed, counts):
    rng = random.Random(seed)
    pool = BufferPool()
    accumulator = Accumulator(pool, LANES, "float32", ELEMENTS)
    waiting = random_cut(rng, 0, LANES) + random_cut(rng, 0, LANES) + random_cut(rng, 0, LANES)
    rng.shuffle(waiting)
    expected, total = node(0, LANES, counts)
    for interval in waiting:
        if accumulator.covers(interval):
            continue
        mean, count = node(*interval, counts)
        whole = accumulator.add(interval, mean if count else None, count)
        if whole is not None:
            break
        check(accumulator, pool)
    else:
        pytest.fail("all lanes arrived and the tree is not whole")
    assert whole.count == total
    assert whole.value is None if total == 0 else torch.equal(whole.value, expected)
    whole.release()
    check(accumulator, pool)
    assert not accumulator.nodes


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.lists(st.integers(0, 3), min_size=LANES, max_size=LANES), st.booleans())
def test_what_follows_the_first_lane_has_its_bits_in_any_order_and_any_cut(seed, counts, lent):
    """Also where nodes wait in memory that may only be read: neither side of two is like the other."""
    rng = random.Random(seed)
    pool, others = BufferPool(), BufferPool()
    accumulator = Accumulator(pool, LANES, "float32", ELEMENTS, first_lane)
    waiting = random_cut(rng, 0, LANES)
    rng.shuffle(waiting)
    for first, last in waiting:
        data = [number for number in range(first, last) if counts[number]]
        memory = others.take("float32", ELEMENTS)
        memory.tensor.copy_(lane(data[0]) if data else lane(99))
        value = memory.tensor if data else None
        count = sum(counts[first:last])
        whole = accumulator.add((first, last), value, count, memory if lent else None, lent=lent)
        memory.release()
        if not lent and whole is None:
            memory.tensor.zero_()
    expected = next((lane(number) for number in range(LANES) if counts[number]), None)
    assert whole.count == sum(counts)
    assert whole.value is None if expected is None else torch.equal(whole.value, expected)
    whole.release()
    assert pool.free_bytes == pool.allocated_bytes
    assert others.free_bytes == others.allocated_bytes


def test_a_larger_interval_replaces_the_smaller_ones_inside_it():
    pool = BufferPool()
    accumulator = Accumulator(pool, 8, "float32", ELEMENTS)
    for number in (0, 2, 3, 5):
        assert accumulator.add((number, number + 1), lane(number), 1) is None
    assert sorted(accumulator.nodes) == [(0, 1), (2, 4), (5, 6)]
    counts = [1] * 8
    assert accumulator.add((0, 4), *node(0, 4, counts)) is None
    assert sorted(accumulator.nodes) == [(0, 4), (5, 6)]
    assert accumulator.covers((2, 3))
    assert not accumulator.covers((4, 8))
    whole = accumulator.add((4, 8), *node(4, 8, counts))
    assert torch.equal(whole.value, node(0, 8, counts)[0])
    whole.release()
    check(accumulator, pool)


def test_the_first_contribution_is_copied():
    accumulator = Accumulator(BufferPool(), 2, "float32", ELEMENTS)
    borrowed = lane(0)
    accumulator.add((0, 1), borrowed, 4)
    borrowed.zero_()
    whole = accumulator.add((1, 2), lane(1), 4)
    assert torch.equal(whole.value, (lane(0) + lane(1)) * 0.5)


def test_integers_are_those_of_the_first_lane_with_data():
    accumulator = Accumulator(BufferPool(), 4, "int64", 2)
    accumulator.add((0, 1), None, 0)
    accumulator.add((2, 4), torch.tensor([5, 6]), 9)
    whole = accumulator.add((1, 2), torch.tensor([7, 8]), 3)
    assert whole.value.tolist() == [7, 8]


def test_lanes_without_data_need_no_memory():
    pool = BufferPool()
    accumulator = Accumulator(pool, 4, "float32", ELEMENTS)
    assert accumulator.add((0, 2), None, 0) is None
    whole = accumulator.add((2, 4), None, 0)
    assert (whole.value, whole.count, pool.allocated_bytes) == (None, 0, 0)


def test_buffers_are_reused():
    pool = BufferPool()
    accumulator = Accumulator(pool, 8, "float32", ELEMENTS)
    for _ in range(20):
        for number in range(8):
            whole = accumulator.add((number, number + 1), lane(number), 1)
        whole.release()
    assert pool.allocated_bytes <= 4 * ELEMENTS * 4
    assert pool.free_bytes == pool.allocated_bytes


def whole_of(order, values, counts, lent):
    pool = BufferPool()
    tree, whole = Accumulator(pool, FOUR, "float32", ELEMENTS), None
    for lane in order:
        value = values[lane].clone() if lane not in lent else values[lane]
        whole = tree.add((lane, lane + 1), value if counts[lane] else None, counts[lane], lent=lane in lent)
    assert whole is not None
    result = whole.value.clone()
    whole.release()
    assert pool.free_bytes == pool.allocated_bytes
    return result


@pytest.mark.parametrize("counts", [(4, 4, 4, 4), (4, 3, 2, 1), (0, 4, 0, 0), (0, 0, 4, 4)])
@pytest.mark.parametrize("lent", [range(FOUR), (0, 3), (2,)])
def test_values_that_are_lent_give_the_same_bits_and_stay_what_they_are(counts, lent):
    values = [lane(number) for number in range(FOUR)]
    before = [value.clone() for value in values]
    expected = whole_of(range(FOUR), values, counts, ())
    for order in permutations(range(FOUR)):
        assert torch.equal(whole_of(order, values, counts, lent), expected), order
    assert all(map(torch.equal, values, before))


def lent_to(tree, number, lenders):
    memory = lenders.take("float32", ELEMENTS)
    memory.tensor.copy_(lane(number))
    whole = tree.add((number, number + 1), memory.tensor, 1, memory, lent=True)
    memory.release()
    return memory, whole


def test_two_values_that_are_lent_are_combined_without_a_copy():
    pool, lenders = BufferPool(), BufferPool()
    tree = Accumulator(pool, 2, "float32", ELEMENTS)
    memory, _ = lent_to(tree, 1, lenders)
    assert pool.allocated_bytes == 0
    assert lenders.free_bytes == 0, "it still waits there"
    _, whole = lent_to(tree, 0, lenders)
    assert torch.equal(whole.value, (lane(0) + lane(1)) * 0.5)
    assert torch.equal(memory.tensor, lane(1))
    assert (whole.buffer.view.nbytes, lenders.free_bytes) == (pool.allocated_bytes, lenders.allocated_bytes)


def test_what_waits_where_it_was_lent_can_be_kept():
    pool, lenders = BufferPool(), BufferPool()
    tree = Accumulator(pool, FOUR, "float32", ELEMENTS)
    for number in (0, 2):
        memory, _ = lent_to(tree, number, lenders)
    tree.keep()
    assert lenders.free_bytes == lenders.allocated_bytes
    memory.tensor.zero_()
    lent_to(tree, 1, lenders)
    _, whole = lent_to(tree, 3, lenders)
    assert torch.equal(whole.value, node(0, FOUR, [1] * FOUR)[0])
    whole.release()
    assert pool.free_bytes == pool.allocated_bytes


def test_roots_of_what_was_lent_lie_where_the_last_one_was():
    pool, lenders = BufferPool(), BufferPool()
    tree, other = (Accumulator(pool, FOUR, "float32", ELEMENTS) for _ in range(2))
    found = []
    for _ in range(3):
        for each in (tree, other):
            for number in range(FOUR):
                _, whole = lent_to(each, number, lenders)
            if each is tree:
                found.append(whole.value.data_ptr())
            each.reuse(whole.buffer)
    assert len(set(found)) == 1
    for each in (tree, other):
        each.clear()
    assert pool.free_bytes == pool.allocated_bytes

"""A block's values alternate between two buffers, so the headers of pulled blocks come again."""

from __future__ import annotations

import random

import torch

from tests.pserver_service.jobs import SGD
from trireme_shared.blocks.buffers import BufferPool
from trireme_shared.protocol.records.layout import Block
from trireme_shared.serving.core.blocks import BlockState
from trireme_shared.serving.core.optimizers import BlockOptimizer, arguments

BLOCKS, ELEMENTS, STEPS = 100, 16, 12


def blocks_of(pool):
    made = []
    for number in range(BLOCKS):
        values = pool.take("float32", ELEMENTS)
        values.tensor.fill_(number)
        optimizer = BlockOptimizer("SGD", arguments(SGD, 0), values.tensor)
        made.append(BlockState(Block(number, 0, 0, ELEMENTS, "float32"), values, pool, 1, optimizer))
    return made


def step(block, number):
    block.push(number, (0, 1), torch.ones(ELEMENTS), 1, {})


def test_values_alternate_between_two_buffers_in_whatever_order_blocks_are_stepped():
    pool, order = BufferPool(), random.Random(1)
    blocks = blocks_of(pool)
    seen = [[block.current.tensor.data_ptr()] for block in blocks]
    for number in range(STEPS):
        for block in order.sample(blocks, BLOCKS):
            step(block, number)
            seen[block.place.number].append(block.current.tensor.data_ptr())
    assert all(set(places[::2]) == {places[0]} and set(places[1::2]) == {places[1]} for places in seen)
    assert pool.allocated_bytes == 2 * BLOCKS * ELEMENTS * 4


def test_a_buffer_that_is_read_is_not_written():
    pool = BufferPool()
    block = blocks_of(pool)[0]
    step(block, 0)
    read, before = block.previous.retain(), block.previous.tensor.clone()
    for number in (1, 2, 3):
        step(block, number)
        assert torch.equal(read.tensor, before)
        assert block.current is not read
        assert block.previous is not read
    read.release()
    assert pool.free_bytes >= read.view.nbytes

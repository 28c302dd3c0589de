"""How long operations of native groups may take, and the memory that they use again."""

from __future__ import annotations

import torch

from trainer_agent.collective.native.link import FLOOR_S, MOST_S, OperationLimit
from trainer_agent.collective.native.reducing import Scratch


def test_the_limit_of_an_operation_follows_steps():
    limit = OperationLimit()
    assert limit.seconds == MOST_S
    limit.took(0.1)
    assert limit.seconds == FLOOR_S
    limit.took(4.0)
    assert limit.seconds == 40.0
    limit.took(100.0)
    assert limit.seconds == MOST_S
    for _ in range(32):
        limit.took(0.1)
    assert limit.seconds == FLOOR_S


def test_the_limit_grows_while_operations_run_out_of_it():
    limit = OperationLimit()
    limit.took(0.1)
    limit.broke(1.0)
    assert limit.seconds == FLOOR_S  # a connection was closed
    limit.broke(FLOOR_S)
    limit.broke(2 * FLOOR_S)
    assert limit.seconds == 4 * FLOOR_S
    for _ in range(10):
        limit.broke(MOST_S)
    assert limit.seconds == MOST_S
    limit.took(0.1)
    assert limit.seconds == FLOOR_S


def test_memory_is_used_again_as_long_as_it_is_enough():
    scratch = Scratch()
    first = scratch.take("given", torch.float32, 2, 3, 100)
    assert (first.shape, first.dtype, first.is_contiguous()) == ((2, 3, 100), torch.float32, True)
    again = scratch.take("given", torch.bfloat16, 50)
    assert again.data_ptr() == first.data_ptr()
    assert scratch.take("taken", torch.float32, 50).data_ptr() != first.data_ptr()
    assert scratch.take("given", torch.float32, 1000).shape == (1000,)

"""Minibatches that are collated ahead: nobody else's random numbers change, and theirs go on where collate
left them."""

from __future__ import annotations

import random

import numpy as np
import torch

from trainer_agent.data.collate import ReadyBatch
from trireme_shared.datasets.random_state import undisturbed


def draws() -> tuple[float, float, float]:
    # user code uses the global generator
    return torch.rand(1).item(), random.random(), np.random.random()  # noqa: NPY002


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002


def test_a_batch_goes_on_behind_its_collate_and_disturbs_nobody() -> None:
    seed(7)
    in_collate, in_forward = draws(), draws()
    seed(1)
    before, behind = draws(), draws()
    seed(1)
    assert draws() == before
    with undisturbed():
        seed(7)
        ready = ReadyBatch.made(draws)
    assert draws() == behind
    assert ready.begin({}) == in_collate
    assert draws() == in_forward

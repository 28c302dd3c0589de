"""The seed of all generators that a minibatch may use."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import torch


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def seed_everything(seed: int) -> None:
    """All generators that a forward pass or a collate may use. `seed`: of 63 bits."""
    if _has_accelerator():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)  # as torch.manual_seed, which asks for devices each time: 0.5 ms
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002  user code uses the global generator

"""Minibatches that take time and no processor: what is measured is waiting, so any number of trainers fit on
two cores.

The time is slept in slices: a process that is stopped (SIGSTOP) makes no headway in its minibatch, as if it
computed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import trireme

HERE = Path(__file__).parent
SLICES, SLICE_S = 20, 0.001

config = trireme.Config(seed=1)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))


def dataset() -> Any:
    return trireme.data.Npy(str(HERE / "x.npy"), str(HERE / "y.npy"), aligned=True)


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    for _ in range(SLICES):
        time.sleep(SLICE_S)
    return functional.mse_loss(model(batch["x"])[:, 0], batch["y"])


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)

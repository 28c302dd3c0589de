"""A perceptron of RESIZED_MIB MiB of float32 parameters (a multiple of 16), stepped by Adam. Each call of
`loss` writes the time into RESIZED_TIMES: with one lane the time between two calls is one step."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import trireme

WIDTH = 2048
LAYERS = int(os.environ["RESIZED_MIB"]) // 16
# for as long as the process lives
TIMES = Path(os.environ["RESIZED_TIMES"]).open("a", buffering=1)  # noqa: SIM115

config = trireme.Config(lanes=1, global_batch_size=16, records_per_task=1600, checkpoint_every_epochs=None)


def model():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def dataset():
    return trireme.data.Npy("x.npy", aligned=True)


def loss(model, batch):
    TIMES.write(f"{time.monotonic()}\n")
    return F.relu(model(batch["x"])).square().mean()


def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-5, fused=True)

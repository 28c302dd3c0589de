"""A residual network of RESIDUAL_MIB MiB of float32 parameters (a multiple of 16), stepped by
RESIDUAL_OPTIMIZER (SGD, Adam).

A minibatch of n records takes 6 n floating point operations per parameter: one record gives a parameter one
use, as in any perceptron; convolutions and sequences use it more often.
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import trireme

WIDTH = 2048
LAYERS = int(os.environ["RESIDUAL_MIB"]) // 16
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-5, fused=True),
}


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return x


def model():
    return Residual()


def dataset():
    return trireme.data.Npy("x.npy", aligned=True)


def loss(model, batch):
    return model(batch["x"]).square().mean()


def optimizer(model):
    return OPTIMIZERS[os.environ["RESIDUAL_OPTIMIZER"]](model.parameters())

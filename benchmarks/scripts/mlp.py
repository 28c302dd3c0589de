"""A perceptron of ten million parameters on made-up data: much to move for what there is to compute.

STEPS_DATA names the folder for the data (32,768 records of 784 float32 and a label).
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import trireme

DATA = Path(os.environ["STEPS_DATA"])
RECORDS = 32768

config = trireme.Config(epochs=1, global_batch_size=256, lanes=2, seed=1, records_per_task=1024)


def model():
    sizes = (784, 2200, 2200, 1600)
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))


def dataset():
    paths = [DATA / "x.npy", DATA / "y.npy"]
    if not all(path.exists() for path in paths):
        numbers = np.random.default_rng(0)
        np.save(paths[0], numbers.standard_normal((RECORDS, 784)).astype(np.float32))
        np.save(paths[1], numbers.integers(0, 10, RECORDS))
    return trireme.data.Npy(*map(str, paths), aligned=True)


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

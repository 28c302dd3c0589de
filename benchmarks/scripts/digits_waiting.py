"""examples/digits whose minibatches take time and no processor: any number of trainers fit on two cores.

The time is slept in slices: a process that is stopped (SIGSTOP) makes no headway in its minibatch, as if it
computed. LEARNING_RATE: of SGD.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "digits"))

import digits
from digits import dataset, evaluation_dataset, model

import trireme

__all__ = ["config", "dataset", "evaluate", "evaluation_dataset", "loss", "metrics", "model", "optimizer"]
SLICES, SLICE_S = 20, 0.001

config = trireme.Config()


def loss(model, batch):
    for _ in range(SLICES):
        time.sleep(SLICE_S)
    return digits.loss(model, batch)


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=float(os.environ.get("LEARNING_RATE", "0.1")), momentum=0.9)


def evaluate(model, batch):
    found = model(batch["pixels"])
    loss_sum = functional.cross_entropy(found, batch["label"], reduction="sum")
    return {"correct": (found.argmax(dim=1) == batch["label"]).sum(), "loss": loss_sum, "records": len(found)}


def metrics(sums):
    return {"accuracy": sums["correct"] / sums["records"], "test_loss": sums["loss"] / sums["records"]}

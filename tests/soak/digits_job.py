"""examples/digits with a brake and a tally (tally.py), without its evaluation."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "digits"))

import digits
from digits import config, dataset, model, optimizer

from tests.soak import tally

__all__ = ["config", "dataset", "loss", "model", "optimizer"]


def loss(model, batch):
    tally.count(batch["pixels"])
    return digits.loss(model, batch)

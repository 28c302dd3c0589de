"""examples/charlm with a brake and a tally (tally.py). With SOAK_MODE=async there is an evaluation of
EVALUATION_S seconds, in which nothing is trained."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "charlm"))

import charlm
from charlm import config, dataset, model, optimizer, scheduler

from tests.soak import tally

__all__ = ["config", "dataset", "loss", "model", "optimizer", "scheduler"]

EVALUATION_S = 2.0


def loss(model, batch):
    tally.count(batch["bytes"])
    return charlm.loss(model, batch)


if os.environ.get("SOAK_MODE") == "async":

    def evaluation_dataset():
        return dataset()

    def evaluate(model, batch):
        time.sleep(EVALUATION_S * len(batch["bytes"]) / 255)
        return {"records": len(batch["bytes"])}

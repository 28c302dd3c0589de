"""Users' scripts for tests: a small regression net on NumPy files, written into the test's own folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np

RECORDS = 192
HEAD = """
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import trireme

HERE = Path(__file__).parent
"""
CONFIG = """
config = trireme.Config(epochs=2, global_batch_size=32, lanes=4, seed=3, records_per_task=16, block_bytes=256)
"""
MODEL = """
def model():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
"""
DATASET = """
def dataset():
    return trireme.data.Npy(str(HERE / "x.npy"), str(HERE / "y.npy"), aligned=True)
"""
LOSS = """
def loss(model, batch):
    return F.mse_loss(model(batch["x"])[:, 0], batch["y"])
"""
UNHURRIED_LOSS = """
import time


def loss(model, batch):
    time.sleep(0.05)  # a job that runs for ever leaves the processors to others
    return F.mse_loss(model(batch["x"])[:, 0], batch["y"])
"""
SLOWABLE_LOSS = """
import time


def loss(model, batch):
    time.sleep(0.1 if (HERE / "slow").exists() else 0)
    return F.mse_loss(model(batch["x"])[:, 0], batch["y"])
"""
OPTIMIZER = """
def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)
"""
EVALUATION = """
def evaluation_dataset():
    return dataset()


def evaluate(model, batch):
    return {"squares": ((model(batch["x"])[:, 0] - batch["y"]) ** 2).sum(), "records": len(batch["y"])}


def metrics(sums):
    return {"mse": sums["squares"] / sums["records"]}
"""

OWN_LOOP = """
def main():
    made = model()
    made, steps, batches = trireme.prepare(
        made, optimizer(made), dataset(), evaluation_dataset=evaluation_dataset, evaluate=evaluate,
        metrics=metrics
    )
    for batch in batches:
        steps.zero_grad()
        trireme.backward(loss(made, batch))
        steps.step()
    torch.save(made.state_dict(), HERE / "after.pt")


if __name__ == "__main__":
    main()
"""


def write_data(folder: Path, records: int = RECORDS) -> None:
    numbers = np.random.default_rng(0)
    x = numbers.standard_normal((records, 8)).astype(np.float32)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", np.tanh(x @ numbers.standard_normal(8).astype(np.float32)))


def write_script(folder: Path, **parts: str) -> Path:
    """`script.py` beside its data; `parts` replace the pieces named as the constants above (loss="...")."""
    pieces = {
        "head": HEAD,
        "config": CONFIG,
        "model": MODEL,
        "dataset": DATASET,
        "loss": LOSS,
        "optimizer": OPTIMIZER,
    }
    assert parts.keys() <= pieces.keys() | {"evaluation"}
    write_data(folder)
    script = folder / "script.py"
    script.write_text("\n".join((pieces | parts).values()))
    return script

"""A small convolutional network learns handwritten digits.

trireme run examples/digits/digits.py --trainers 2 --pservers 2       a cluster on this machine
python examples/digits/digits.py                                      one process, no services
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from prepare import prepare
from torch import nn
from torch.nn import functional as F  # noqa: N812

import trireme

DATA = Path(os.environ.get("DIGITS_DATA", Path(__file__).resolve().parent / "data"))

config = trireme.Config(
    epochs=12,
    global_batch_size=64,
    lanes=4,
    seed=1,
    block_bytes=1 << 16,  # small, so that two parameter servers have something to do
)


def model():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def dataset():
    return trireme.data.Parquet(f"{prepare(DATA)}/train-*.parquet")


def loss(model, batch):
    return F.cross_entropy(model(batch["pixels"]), batch["label"])


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def evaluation_dataset():
    return trireme.data.Parquet(f"{prepare(DATA)}/test.parquet")


def evaluate(model, batch):
    correct = model(batch["pixels"]).argmax(dim=1) == batch["label"]
    return {"correct": correct.sum(), "records": len(correct)}


def metrics(sums):
    return {"accuracy": sums["correct"] / sums["records"]}


if __name__ == "__main__":
    trireme.train(__name__)

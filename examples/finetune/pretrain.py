"""First part of fine-tuning: a small convolutional network learns the digits 0 to 4.

trireme run examples/finetune/pretrain.py --trainers 2            then finetune.py goes on from its model
python examples/finetune/pretrain.py --export pretrained          the same in one process
"""

from __future__ import annotations

import torch
from digits_of import trunk, which
from torch import nn
from torch.nn import functional as F  # noqa: N812

import trireme

config = trireme.Config(epochs=6, global_batch_size=64, lanes=4, seed=1, records_per_task=128)


def model():
    return nn.Sequential(trunk(), nn.Linear(512, 5))


def dataset():
    return which(range(5), "train")


def loss(model, batch):
    return F.cross_entropy(model(batch["pixels"]), batch["label"])


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def evaluation_dataset():
    return which(range(5), "test")


def evaluate(model, batch):
    correct = model(batch["pixels"]).argmax(dim=1) == batch["label"]
    return {"correct": correct.sum(), "records": len(correct)}


def metrics(sums):
    return {"accuracy": sums["correct"] / sums["records"]}


if __name__ == "__main__":
    trireme.train(__name__)

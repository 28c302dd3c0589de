"""Second part: the frozen trunk of the first network, and a new head that learns the digits 5 to 9.

trireme run examples/finetune/finetune.py --trainers 2 --init-from pretrain
python examples/finetune/finetune.py --init-from pretrained/model.safetensors
"""

from __future__ import annotations

import torch
from digits_of import trunk, which
from torch import nn
from torch.nn import functional as F  # noqa: N812

import trireme

config = trireme.Config(
    epochs=6,
    global_batch_size=64,
    lanes=4,
    seed=1,
    records_per_task=128,
    init_partial=True,  # the old head (1.weight, 1.bias) is left out
)


def model():
    frozen = trunk().requires_grad_(False)
    return nn.Sequential(frozen, nn.Identity(), nn.Linear(512, 5))


def dataset():
    return which(range(5, 10), "train")


def loss(model, batch):
    return F.cross_entropy(model(batch["pixels"]), batch["label"] - 5)


def optimizer(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def evaluation_dataset():
    return which(range(5, 10), "test")


def evaluate(model, batch):
    correct = model(batch["pixels"]).argmax(dim=1) == batch["label"] - 5
    return {"correct": correct.sum(), "records": len(correct)}


def metrics(sums):
    return {"accuracy": sums["correct"] / sums["records"]}


if __name__ == "__main__":
    trireme.train(__name__)

"""A model and a dataset whose computing and reading take as long as READING says: see benchmarks/reading.py.

In a trainer each minibatch notes when this process read its first record and when it computed its last one.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import trireme

WIDTH = 256
BLOB = zlib.compress(bytes(range(256)) * 256)


@dataclass(frozen=True)
class Given:
    """`kind`: what reading a record does. `reads`, `computes`: how often a record, a minibatch repeats its
    work; where it `waits`: milliseconds. `noted`: the file of the two times."""

    kind: str = "decodes"
    records: int = 2048
    reads: float = 1
    computes: float = 1
    noted: str = os.devnull


GIVEN = Given(**json.loads(os.environ.get("READING", "{}")))
began: list[float] = []

config = trireme.Config(epochs=1, global_batch_size=16, lanes=1, seed=1, shuffle=False)


class Slow(Dataset):
    def __len__(self):
        return GIVEN.records

    def __getitem__(self, number):
        if not began:
            began.append(time.monotonic())
        if GIVEN.kind == "waits":
            time.sleep(GIVEN.reads / 1000)
        elif GIVEN.kind == "decodes":  # as a decoder of images: without the interpreter's lock
            for _ in range(int(GIVEN.reads)):
                zlib.decompress(BLOB)
        else:
            sum(range(int(GIVEN.reads) * 100))
        generator = torch.Generator().manual_seed(number)
        return {"x": torch.randn(WIDTH, generator=generator).numpy(), "y": number % 10}


def dataset():
    return Slow()


def model():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def loss(model, batch):
    if GIVEN.kind == "waits":
        time.sleep(GIVEN.computes / 1000)
    found = batch["x"]
    for _ in range(1 if GIVEN.kind == "waits" else int(GIVEN.computes)):
        found = model[1](model[0](found))
    value = functional.cross_entropy(model[2](found), batch["y"])
    if began:
        Path(GIVEN.noted).write_text(f"{began[0]} {time.monotonic()}")
    return value

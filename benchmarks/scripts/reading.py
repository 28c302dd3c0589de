"""A model and a dataset whose computing and reading take as long as READING says: see benchmarks/reading.py.

A job notes when it read its first record, in whichever process, and when it computed its last minibatch.
"""

from __future__ import annotations

import io
import json
import os
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import trireme

WIDTH = 256
SIDE = 224
BLOB = zlib.compress(bytes(range(256)) * 256)


@dataclass(frozen=True)
class Given:
    """`kind`: what reading a record does. `reads`, `computes`: how often a record, a minibatch repeats its
    work; where it `waits`: milliseconds. `noted`: the file of the last time; the first one is beside it."""

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
            with suppress(OSError), Path(f"{GIVEN.noted}.began").open("x") as first:  # of several processes
                first.write(str(began[0]))
        if GIVEN.kind == "waits":
            time.sleep(GIVEN.reads / 1000)
        elif GIVEN.kind == "jpeg":
            picture = np.asarray(Image.open(io.BytesIO(_picture())).convert("RGB").resize((SIDE, SIDE)))
            x = (
                picture.transpose(2, 0, 1).astype(np.float32).ravel()[:: 3 * SIDE * SIDE // WIDTH][:WIDTH]
                / 255
            )
            return {"x": x, "y": number % 10}
        elif GIVEN.kind == "decodes":  # as a decoder of images: without the interpreter's lock
            for _ in range(int(GIVEN.reads)):
                zlib.decompress(BLOB)
        else:
            sum(range(int(GIVEN.reads) * 100))
        generator = torch.Generator().manual_seed(number)
        return {"x": torch.randn(WIDTH, generator=generator).numpy(), "y": number % 10}


@cache
def _picture():
    """A JPEG of 640 x 480 points: 100 kB."""
    points = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    made = io.BytesIO()
    Image.fromarray(points).resize((640, 480)).save(made, "jpeg", quality=90)
    return made.getvalue()


@cache
def _noted():
    """Open, since each minibatch of a job writes there: plain PyTorch's do not."""
    return os.open(GIVEN.noted, os.O_WRONLY | os.O_CREAT)


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
    if GIVEN.noted != os.devnull:
        os.pwrite(_noted(), str(time.monotonic()).ljust(24).encode(), 0)
    return value

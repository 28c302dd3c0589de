"""Handwritten digits with a loop of one's own, in as many processes as there are: gradients are averaged over
whoever lives.

python examples/own_allreduce/start.py --members 3               an etcd and three of these on this machine
TRIREME_ETCD=http://HOST:2379 TRIREME_JOB=digits python examples/own_allreduce/digits_allreduce.py
    one of them, anywhere
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import trireme

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "digits"))
from prepare import prepare, read

STEPS = int(os.environ.get("STEPS", "300"))
DATA = prepare(Path(os.environ.get("DIGITS_DATA", Path(__file__).resolve().parents[1] / "digits" / "data")))


def tensors(records):
    return torch.tensor([r["label"] for r in records]), torch.stack(
        [torch.from_numpy(r["pixels"]) for r in records]
    )


torch.set_num_threads(1)
label, pixels = tensors(read(DATA, "train-*.parquet"))
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
step = 0

communicator = trireme.CollectiveCommunicator()
while True:
    if communicator.joined:  # somebody is new: the oldest member's state for everybody
        status, state = communicator.broadcast([step, model.state_dict(), optimizer.state_dict()])
        if status == trireme.SUCCEEDED:
            step = state[0]
            model.load_state_dict(state[1])
            optimizer.load_state_dict(state[2])
        continue
    if step == STEPS:
        if communicator.barrier() == trireme.SUCCEEDED:  # everybody has the last step
            break
        continue
    rows = torch.randint(len(label), (32,))
    optimizer.zero_grad()
    F.cross_entropy(model(pixels[rows]), label[rows]).backward()
    status, gradients = communicator.allreduce(
        [p.grad for p in model.parameters()], op="MEAN", weight=len(rows)
    )
    if status == trireme.SUCCEEDED:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        step += 1
        if step % 100 == 0 and communicator.rank == 0:
            print(f"step {step} of {STEPS}, {communicator.size} members", flush=True)
communicator.close()

label, pixels = tensors(read(DATA, "test.parquet"))
with torch.no_grad():
    print(f"accuracy {(model(pixels).argmax(dim=1) == label).float().mean():.4f} after {step} steps")

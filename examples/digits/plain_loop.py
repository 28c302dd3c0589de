"""Handwritten digits: an ordinary PyTorch loop in plain_loop.py, the same loop with Trireme in own_loop.py.
Five lines differ.

trireme run examples/digits/own_loop.py --trainers 2 --pservers 2       a cluster on this machine
python examples/digits/own_loop.py                                      one process, no services
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from prepare import prepare, read
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

DATA = prepare(Path(os.environ.get("DIGITS_DATA", Path(__file__).resolve().parent / "data")))

torch.manual_seed(1)
model = nn.Sequential(
    nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.25), nn.Linear(128, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
data = read(DATA, "train-*.parquet")
batches = DataLoader(data, batch_size=64, shuffle=True)

for batch in (batch for _ in range(8) for batch in batches):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch["pixels"]), batch["label"])
    loss.backward()
    optimizer.step()

model.eval()
with torch.no_grad():
    test = next(iter(DataLoader(read(DATA, "test.parquet"), batch_size=1000)))
    correct = (model(test["pixels"]).argmax(dim=1) == test["label"]).float().mean()
print(f"accuracy {correct:.4f}")

"""examples/deepfm/clicks.py as one writes it in plain PyTorch: nn.Embedding(sparse=True) with all rows,
SparseAdam for them and Adam for the rest."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "deepfm"))

import clicks
from clicks import config, dataset, loss

from benchmarks.scripts.two_optimizers import TwoOptimizers

__all__ = ["config", "dataset", "loss", "model", "optimizer"]
ROWS = json.loads((clicks.DATA / "about.json").read_text())["total_rows"]
LR = 0.002


class DeepFM(clicks.FactorizedScores):
    def __init__(self):
        super().__init__(clicks.FIELDS, clicks.DIM, widths=clicks.WIDTHS, dense=clicks.DENSE)
        first = torch.empty(ROWS, 1 + clicks.DIM).normal_(std=0.01)
        self.rows = nn.Embedding.from_pretrained(first, freeze=False, sparse=True)

    def forward(self, ids, dense):
        return self.scores(self.rows(ids), dense)


def model():
    return DeepFM()


def optimizer(model):
    rows = torch.optim.SparseAdam(model.rows.parameters(), lr=LR)
    return TwoOptimizers(rows, torch.optim.Adam(model.deep.parameters(), lr=LR, fused=True))

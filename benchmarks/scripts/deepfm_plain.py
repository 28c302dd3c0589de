"""examples/deepfm/deepfm.py as one writes it in plain PyTorch: nn.Embedding and nn.EmbeddingBag with all
rows; Adagrad for them and Adam for the rest.

DEEPFM_DENSE=1: gradients of tables are dense, so a step sends and steps all rows. Ids are numbers of rows
before training begins.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pyarrow.parquet as pq
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "deepfm"))

import deepfm
from data import GENRES, PADDING, prepare
from deepfm import config, dataset, evaluation_dataset

from benchmarks.scripts.two_optimizers import TwoOptimizers
from trainer_agent.data import default_collate

__all__ = [
    "collate",
    "config",
    "dataset",
    "evaluate",
    "evaluation_dataset",
    "loss",
    "metrics",
    "model",
    "optimizer",
]
SPARSE = os.environ.get("DEEPFM_DENSE") != "1"
ROWS = {"user": 944, "movie": 1683, "decade": 10, "genre": 20}  # ids begin with 0 or 1
LR, LR_OF_ROWS, SCALE = 0.002, 0.05, 0.05


def occupations():
    tables = [
        pq.read_table(prepare(deepfm.DATA) / f"{part}.parquet", columns=["occupation"])
        for part in ("train", "test")
    ]
    return {
        name: number
        for number, name in enumerate(sorted({each for t in tables for each in t["occupation"].to_pylist()}))
    }


NUMBERS = occupations()


def collate(records):
    return default_collate([{**record, "occupation": NUMBERS[record["occupation"]]} for record in records])


class DeepFM(deepfm.FactorizedScores):
    def __init__(self):
        super().__init__(fields=5, dim=deepfm.DIM, widths=(32, 16), dropout=0.2)
        counts = {**ROWS, "occupation": len(NUMBERS)}
        of = {
            name: nn.Embedding(count, 1 + deepfm.DIM, sparse=SPARSE)
            for name, count in counts.items()
            if name != "genre"
        }
        self.tables = nn.ModuleDict(of)
        self.tables["genre"] = nn.EmbeddingBag(
            counts["genre"], 1 + deepfm.DIM, mode="mean", padding_idx=0, sparse=SPARSE
        )
        for table in self.tables.values():
            nn.init.normal_(table.weight, std=SCALE)

    def forward(self, user, decade, occupation, movie, genres):
        of = self.tables
        fields = [of["user"](user), of["decade"](decade), of["occupation"](occupation), of["movie"](movie)]
        return self.scores(torch.stack([*fields, of["genre"](genres - PADDING)], dim=1))


def model():
    return DeepFM()


def optimizer(model):
    tables = torch.optim.Adagrad(list(model.tables.parameters()), lr=LR_OF_ROWS)
    return TwoOptimizers(tables, torch.optim.Adam(model.deep.parameters(), lr=LR, fused=True))


def loss(model, batch):
    scores = model(batch["user"], batch["decade"], batch["occupation"], batch["movie"], batch["genres"])
    return F.binary_cross_entropy_with_logits(scores, batch["liked"])


def evaluate(model, batch):
    rated = batch["movie"] != PADDING
    of = rated.nonzero()[:, 0]
    genres = batch["genres"].unflatten(1, (-1, GENRES))[rated]
    scores = model(
        batch["user"][of], batch["decade"][of], batch["occupation"][of], batch["movie"][rated], genres
    )
    found = F.binary_cross_entropy_with_logits(scores, batch["liked"][rated], reduction="sum")
    return {"loss": found, "ratings": int(rated.sum())}


def metrics(sums):
    return {"loss": sums["loss"] / sums["ratings"]}

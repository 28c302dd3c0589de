"""trireme.metrics: the values of the whole dataset, whatever parts of it are seen together."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from trireme.metrics import AUC, F1, Perplexity, Precision, Recall, RecallAtK

RECORDS = 2000
DRAWN = torch.Generator().manual_seed(0)
LABELS = (torch.rand(RECORDS, generator=DRAWN) < 0.2).long()
LOGITS = torch.randn(RECORDS, generator=DRAWN) + 1.5 * LABELS - 2
CLASSES = torch.randint(0, 4, (RECORDS,), generator=DRAWN)  # of 5: one is never there
SCORES = torch.randn(RECORDS, 5, generator=DRAWN) + functional.one_hot(CLASSES, 5) - torch.arange(5) * 0.5


def exact_auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    ones, zeros = scores[labels == 1].double(), scores[labels == 0].double()
    compared = (ones[:, None] > zeros) + 0.5 * (ones[:, None] == zeros)
    return float(compared.mean())


def of(metric, values: torch.Tensor, labels: torch.Tensor, size: int):
    for first in range(0, len(labels), size):
        metric.update(values[first : first + size], labels[first : first + size])
    return metric


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("bins", [8, 64, 2048])
@pytest.mark.filterwarnings("ignore:AUC with")
def test_auc_is_within_its_error_bound_of_the_exact_value_and_the_same_in_all_parts(bins: int, logits: bool):
    scores = LOGITS if logits else LOGITS.sigmoid()
    found = of(AUC(bins, logits=logits), scores, LABELS, 64)
    assert abs(found.compute() - exact_auc(LOGITS, LABELS)) <= found.error_bound()
    assert found.compute() == of(AUC(bins, logits=logits), scores, LABELS, RECORDS).compute()
    assert bins < 2048 or abs(found.compute() - exact_auc(LOGITS, LABELS)) < 2e-4


def test_auc_of_scores_near_zero_is_as_exact_as_of_others():
    rare = of(AUC(), (LOGITS - 8).sigmoid(), LABELS, 512)
    assert rare.compute() == pytest.approx(exact_auc(LOGITS, LABELS), abs=2e-4)


def test_auc_says_when_its_bins_are_too_coarse_and_what_it_cannot_take():
    with pytest.warns(UserWarning, match=r"AUC with 4 bins is 0\.\d+ within 0\.\d+; give more bins"):
        of(AUC(4), LOGITS.sigmoid(), LABELS, 512).compute()
    assert math.isnan(of(AUC(), LOGITS.sigmoid(), torch.zeros(RECORDS), 512).compute())
    with pytest.raises(ValueError, match=r"outside of 0 to 1; give probabilities, or AUC\(logits=True\)"):
        AUC().update(LOGITS, LABELS)
    with pytest.raises(ValueError, match="labels other than 0 and 1"):
        AUC().update(LOGITS.sigmoid(), CLASSES)
    with pytest.raises(ValueError, match="NaN"):
        AUC().update(LOGITS * math.nan, LABELS)
    with pytest.raises(ValueError, match="2000 predictions and 3 labels"):
        AUC().update(LOGITS.sigmoid(), LABELS[:3])


def test_precision_recall_and_f1_are_those_of_the_counts():
    found = SCORES.argmax(1)
    right = torch.tensor([float(((found == n) & (n == CLASSES)).sum()) for n in range(5)]).double()
    predicted, actual = (torch.bincount(each, minlength=5).double() for each in (found, CLASSES))
    wanted = {
        Precision: right / predicted.clamp(min=1),
        Recall: right / actual.clamp(min=1),
        F1: 2 * right / (predicted + actual),
    }
    for kind, values in wanted.items():
        assert torch.equal(of(kind(5, "none"), SCORES, CLASSES, 300).compute(), values)
        assert of(kind(5), found, CLASSES, 300).compute() == pytest.approx(float(values.mean()))
    assert of(F1(6), found, CLASSES, 300).compute() == pytest.approx(float(wanted[F1].mean()))  # 5 is nowhere


def test_of_two_classes_those_of_class_one_are_told():
    found = (LOGITS > 0).long()
    right = int((found & LABELS).sum())
    assert of(Precision(), LOGITS.sigmoid(), LABELS, 300).compute() == right / int(found.sum())
    assert of(Recall(), found, LABELS, 300).compute() == right / int(LABELS.sum())
    with pytest.raises(ValueError, match=r"F1 of 2 classes got labels \[0, 1, 2, 3\]"):
        F1().update(found, CLASSES)
    with pytest.raises(ValueError, match="give classes as integers"):
        F1(5).update(LOGITS, CLASSES)


def test_perplexity_is_that_of_all_tokens():
    logits, targets = SCORES.reshape(50, 40, 5), CLASSES.reshape(50, 40).clone()
    targets[3, 5:] = -100
    loss = functional.cross_entropy(logits.reshape(-1, 5), targets.reshape(-1)).double()
    assert of(Perplexity(), logits, targets, 7).compute() == pytest.approx(math.exp(loss), rel=1e-6)
    assert math.isnan(Perplexity().compute())


@pytest.mark.parametrize("k", [1, 2, 5])
def test_recall_at_k_counts_right_items_among_the_first(k: int):
    among = SCORES.topk(k).indices == CLASSES[:, None]
    assert of(RecallAtK(k), SCORES, CLASSES, 300).compute() == float(among.any(1).double().mean())


def test_a_model_that_scores_all_items_alike_finds_none():
    assert of(RecallAtK(2), torch.zeros(RECORDS, 5), CLASSES, 300).compute() == 0


def test_a_reset_metric_has_seen_nothing():
    metric = of(RecallAtK(5), SCORES, CLASSES, 300)
    metric.reset()
    assert math.isnan(metric.compute())

"""Metric objects of a script: torchmetrics' and others, evaluated in parts by several trainers, computed by
one that has seen no record."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torchmetrics
from torchmetrics import classification, regression, retrieval, text, wrappers
from torchmetrics.detection.mean_ap import MeanAveragePrecision

from trainer_agent.model.metric_objects import MetricObjects
from trainer_agent.script.inspect import kept_values, summed_means
from trainer_agent.script.user_module import UserModule
from trireme_shared.protocol.errors import InvalidArgument, UserCodeError
from trireme_shared.protocol.records import EvaluationSums
from trireme_shared.protocol.records.metric_states import Sum, merged

CPU = torch.device("cpu")
RECORDS, SIZE, PER_TASK = 300, 16, 4  # the last minibatch is short, the last task, too
DRAWN = torch.Generator().manual_seed(0)
TRUE = torch.randint(0, 2, (RECORDS,), generator=DRAWN)
SCORES = (torch.randn(RECORDS, generator=DRAWN) + TRUE).sigmoid()
CLASS_SCORES = torch.randn(RECORDS, 5, generator=DRAWN)
CLASSES = torch.randint(0, 5, (RECORDS,), generator=DRAWN)
VALUES = torch.randn(RECORDS, generator=DRAWN)
QUERIES = torch.randint(0, 20, (RECORDS,), generator=DRAWN)

BINARY, OF_CLASSES, NUMBERS = (SCORES, TRUE), (CLASS_SCORES, CLASSES), (SCORES, VALUES)
BY_QUERY = SCORES, TRUE, QUERIES
EXACT = {
    "auc of every record": (lambda: classification.BinaryAUROC(), BINARY),
    "auc by thresholds": (lambda: classification.BinaryAUROC(thresholds=50), BINARY),
    "average precision": (lambda: classification.MulticlassAveragePrecision(5), OF_CLASSES),
    "f1": (lambda: classification.MulticlassF1Score(5, average="macro"), OF_CLASSES),
    "f1 of each class": (lambda: classification.MulticlassF1Score(5, average=None), OF_CLASSES),
    "confusion": (lambda: classification.MulticlassConfusionMatrix(5), OF_CLASSES),
    "ranks": (lambda: regression.SpearmanCorrCoef(), NUMBERS),
    "recall at k": (lambda: retrieval.RetrievalRecall(top_k=3), BY_QUERY),
    "mean average precision of queries": (lambda: retrieval.RetrievalMAP(), BY_QUERY),
    "largest": (lambda: torchmetrics.MaxMetric(), (VALUES,)),
    "smallest": (lambda: torchmetrics.MinMetric(), (VALUES,)),
    "all": (lambda: torchmetrics.CatMetric(), (VALUES,)),
}
ROUNDED = {  # float32 sums, and means that are merged: of other bits in other parts, in torchmetrics itself
    "squares": (lambda: torchmetrics.MeanSquaredError(), NUMBERS),
    "r2": (lambda: torchmetrics.R2Score(), NUMBERS),
    "correlation": (lambda: torchmetrics.PearsonCorrCoef(), NUMBERS),
    "perplexity": (lambda: text.Perplexity(), (CLASS_SCORES[:, None], CLASSES[:, None])),
    "mean": (lambda: torchmetrics.MeanMetric(), (VALUES,)),
}


def objects_of(made, tmp_path: Path) -> MetricObjects:
    """Of a script whose evaluation_metrics() is `made`."""
    module = ModuleType("script")
    nothing = lambda *_: None  # noqa: E731
    parts = dict.fromkeys(("model", "dataset", "loss", "optimizer", "evaluate"), nothing)
    vars(module).update(parts, evaluation_metrics=made)
    return MetricObjects(UserModule(tmp_path / "script.py", module), CPU)


def report(objects: MetricObjects, columns: tuple[torch.Tensor, ...], first: int) -> dict[str, Sum]:
    """Of the task that begins at that record."""
    sums: dict[str, Sum] = {}
    for start in range(first, min(first + SIZE * PER_TASK, RECORDS), SIZE):
        (given,) = objects.begin()
        given["metric"].update(*(column[start : start + SIZE] for column in columns))
        for name, value in objects.beside({"records": float(len(columns[0][start : start + SIZE]))}).items():
            sums[name] = merged(name, sums.get(name), value)
    return sums


def evaluated(make, columns: tuple[torch.Tensor, ...], tmp_path: Path, order: int = 1) -> dict[str, Any]:
    """By three trainers; what is stored between tasks is bytes, and another trainer computes."""
    trainers = [objects_of(lambda: {"metric": make()}, tmp_path) for _ in range(3)]
    found = [
        (number, report(trainers[number % 3], columns, first))
        for number, first in enumerate(range(0, RECORDS, SIZE * PER_TASK))
    ]
    total = EvaluationSums()
    for number, sums in found[::order]:
        total = EvaluationSums.from_bytes(total.plus(sums, number).bounded().to_bytes())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*was called before the ``update`` method")
        return objects_of(lambda: {"metric": make()}, tmp_path).computed(total.sums)


def undivided(make, columns: tuple[torch.Tensor, ...]) -> torch.Tensor:
    metric = make()
    for start in range(0, RECORDS, SIZE):
        metric.update(*(column[start : start + SIZE] for column in columns))
    return metric.compute()


@pytest.mark.filterwarnings("ignore:Metric `:UserWarning")
@pytest.mark.parametrize("name", EXACT)
def test_a_metric_of_torchmetrics_has_the_bits_of_one_object_that_sees_all(name: str, tmp_path: Path):
    make, columns = EXACT[name]
    found = evaluated(make, columns, tmp_path)
    assert torch.equal(found["metric"], undivided(make, columns))
    assert found["records"] == RECORDS


@pytest.mark.filterwarnings("ignore:Metric `:UserWarning")
@pytest.mark.parametrize("name", ROUNDED)
def test_sums_of_floats_are_the_same_in_whatever_order_tasks_end(name: str, tmp_path: Path):
    make, columns = ROUNDED[name]
    found = evaluated(make, columns, tmp_path)["metric"]
    assert torch.equal(found, evaluated(make, columns, tmp_path, order=-1)["metric"])
    assert torch.allclose(found, undivided(make, columns), rtol=1e-5)


def refused(found: object, tmp_path: Path, *columns: torch.Tensor) -> str:
    objects = objects_of(lambda: found() if callable(found) else found, tmp_path)
    with pytest.raises(UserCodeError) as error:
        (given,) = objects.begin()
        given["m"].update(*columns)
        objects.beside({"records": 1.0})
    assert error.value.details["fatal"]
    return error.value.message


class Kept:
    """Keeps a number beside its state."""

    def __init__(self) -> None:
        self._defaults, self._reductions = {"total": torch.zeros(())}, {"total": "sum"}
        self.records = 0
        self.reset()

    def reset(self) -> None:
        self.total = torch.zeros(())

    def update(self, values: torch.Tensor) -> None:
        self.total = self.total + values.sum()
        self.records += len(values)

    def compute(self) -> float:
        return float(self.total) / max(self.records, 1)


class Boxes(torchmetrics.Metric):
    """Keeps what torchmetrics' MeanAveragePrecision keeps: of each image all its boxes, perhaps none."""

    boxes: list[torch.Tensor]
    labels: list[torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("boxes", default=[], dist_reduce_fx=None)
        self.add_state("labels", default=[], dist_reduce_fx=None)

    def update(self, first: torch.Tensor) -> None:
        for number in first.tolist():
            self.boxes.append(torch.full((number % 4, 4), float(number)))
            self.labels.append(torch.full((number % 4,), number))

    def compute(self) -> torch.Tensor:
        places = [
            torch.tensor([*each.shape, label.sum()])
            for each, label in zip(self.boxes, self.labels, strict=True)
        ]
        return torch.stack(places)


def test_what_is_kept_of_each_image_stays_in_one_piece(tmp_path: Path):
    columns = (torch.arange(RECORDS),)
    assert torch.equal(evaluated(Boxes, columns, tmp_path)["metric"], undivided(Boxes, columns))


def test_a_metric_that_lacks_a_package_says_which(tmp_path: Path):
    with pytest.raises(UserCodeError, match="pycocotools"):
        objects_of(lambda: {"map": MeanAveragePrecision()}, tmp_path).begin()


def test_what_cannot_be_gathered_exactly_is_refused_by_name(tmp_path: Path):
    assert "evaluation_metrics() returned list; return a dict" in refused([], tmp_path)
    assert "gives int as m, which has no update, compute, reset" in refused({"m": 3}, tmp_path)
    several = torchmetrics.MetricCollection([classification.BinaryF1Score()])
    assert "those of a MetricCollection one by one" in refused({"m": several}, tmp_path)
    wrapped = wrappers.MinMaxMetric(classification.BinaryF1Score())
    assert "which has no states of its own" in refused({"m": wrapped}, tmp_path)

    class Averaged(torchmetrics.Metric):
        def __init__(self, reduction: str, start: float = 0.0) -> None:
            super().__init__()
            self.add_state("value", torch.tensor(start), reduction)

        def update(self) -> None: ...

        def compute(self) -> None: ...

    assert "state value is reduced by dim_zero_mean" in refused({"m": Averaged("mean")}, tmp_path)
    assert "starts at 2.0; a sum over minibatches has to start at 0" in refused(
        {"m": Averaged("sum", 2.0)}, tmp_path
    )
    told = refused(lambda: {"m": Kept()}, tmp_path, VALUES[:8])
    assert "it keeps something beside them; keep it in a state" in told
    named = objects_of(lambda: {"records": classification.BinaryF1Score()}, tmp_path)
    named.begin()
    with pytest.raises(UserCodeError, match="evaluate returned records, and evaluation_metrics"):
        named.beside({"records": 1.0})


def test_without_the_check_of_states_the_wrong_value_would_be_computed(tmp_path: Path):
    seen, other = Kept(), Kept()
    seen.update(VALUES[:8])
    other.total = seen.total
    assert seen.compute() != other.compute()


def test_no_object_waits_for_other_processes(tmp_path: Path):
    """In a job whose trainers have torch.distributed, one of them computes, and nobody else."""

    def waits(*_: object, **__: object) -> None:
        raise AssertionError("it waits for all processes")

    def make() -> Mapping[str, object]:
        metric = classification.BinaryF1Score(dist_sync_fn=waits, distributed_available_fn=lambda: True)
        return {"metric": metric}

    objects = objects_of(make, tmp_path)
    sums = report(objects, BINARY, 0)
    assert float(objects.computed(sums)["metric"]) > 0


def test_values_without_a_metrics_function_are_numbers_by_name(tmp_path: Path):
    objects = objects_of(dict, tmp_path)
    found = objects.numbers(
        {"one": torch.tensor(0.5), "each": torch.tensor([1.0, 2.0]), "map": {"map_50": torch.tensor(3.0)}}
    )
    assert found == {"one": 0.5, "each.0": 1.0, "each.1": 2.0, "map.map_50": 3.0}
    with pytest.raises(UserCodeError, match=r"curve gives tuple, which is no number; .* metrics\(sums\)"):
        objects.numbers({"curve": (torch.zeros(3), torch.zeros(2))})


def test_a_script_that_has_objects_and_no_place_for_them_is_refused(tmp_path: Path):
    module = ModuleType("script")
    parts = dict.fromkeys(("model", "dataset", "loss", "optimizer"), lambda *_: None)
    vars(module).update(parts, evaluation_metrics=dict)
    with pytest.raises(InvalidArgument, match=r"has evaluation_metrics\(\) and no evaluate"):
        UserModule(tmp_path / "script.py", module)
    vars(module).update(evaluate=lambda model, batch: None)
    with pytest.raises(InvalidArgument, match="does not take 3 arguments"):
        UserModule(tmp_path / "script.py", module)


def test_the_check_before_training_tells_how_many_records_a_metric_can_keep(tmp_path: Path):
    objects = objects_of(lambda: {"auc": classification.BinaryAUROC()}, tmp_path)
    (given,) = objects.begin()
    given["auc"].update(SCORES, TRUE)
    (told,) = kept_values("digits.py", objects.beside({"records": 300.0}), RECORDS)
    found = re.fullmatch(
        r"digits\.py: the metric auc keeps values of every record, about (\d+) bytes each: an evaluation of "
        r"more than about ([\d,]+) records fails the job; the size of trireme\.metrics\.AUC, or of one with "
        r"thresholds=, does not grow with them",
        told,
    )
    assert found, told
    assert 4 <= int(found[1]) <= 8
    assert 20_000 < int(found[2].replace(",", "")) < 50_000
    by_thresholds = objects_of(lambda: {"auc": classification.BinaryAUROC(thresholds=9)}, tmp_path)
    by_thresholds.begin()
    assert kept_values("digits.py", by_thresholds.beside({}), RECORDS) == []


def test_a_mean_that_evaluate_returns_is_told_where_nothing_divides() -> None:
    (told,) = summed_means("mine.py", {"recall": 0.25, "right": 3.0, "records": 12})
    assert told.startswith(
        "mine.py: evaluate returns recall = 0.25 for a minibatch, and without metrics(sums)"
    )
    assert summed_means("mine.py", {"right": 3.0, "records": 12}) == []

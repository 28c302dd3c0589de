"""`trireme.log_metrics`: bounded numbers under names that are not the job's own, collected while the loss
runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import trireme
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.metrics import (
    MOST_NAMES,
    Logged,
    add,
    collected,
    loss_in,
    metrics_beside,
    rate_names,
)


def test_values_of_a_name_come_together_and_only_while_somebody_collects() -> None:
    trireme.log_metrics({"before": 1})
    with collected() as found:
        trireme.log_metrics({"a": 1, "b.c-d_e": torch.tensor([0.5], requires_grad=True)})
        trireme.log_metrics({"a": True, "n": float("nan"), "i": float("inf")})
        with collected() as inner:
            trireme.log_metrics({"a": 9})
        trireme.log(a=-2.0)
    trireme.log_metrics({"after": 1})
    assert found == {"a": Logged(0.0, 3.0, -2.0, 1.0), "b.c-d_e": Logged(0.5, 1.0, 0.5, 0.5)}
    assert inner == {"a": Logged(9.0, 1.0, 9.0, 9.0)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"": 1}, "name ''"),
        ({"1a": 1}, "name '1a'"),
        ({"a/b": 1}, "a/b"),
        ({"x" * 65: 1}, "at most 64"),
        ({3: 1}, "name 3"),
        ({"loss": 1}, "the job itself uses"),
        *[
            ({name: 1}, "the job itself uses")
            for name in ("evaluation.accuracy", "lr", "lr.0", "time.push", "nonfinite")
        ],
        *[({name: 1}, "the job itself uses") for name in ("grad_norm", "records_per_second")],
        ({"a": "1"}, "it takes numbers"),
        ({"a": None}, "it takes numbers"),
        ({"a": torch.ones(2)}, "one element"),
        ({"a": 10**400}, "it takes numbers"),
        ({f"m{number}": 1 for number in range(MOST_NAMES + 1)}, "more than 32 metrics"),
    ],
)
def test_what_is_no_metric_is_refused_with_one_message(values: Mapping[Any, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message), collected() as found:
        trireme.log_metrics(values)
    assert not found


def test_names_of_one_minibatch_are_bounded_together() -> None:
    with collected(), pytest.raises(InvalidArgument, match="more than 32 metrics"):
        for number in range(MOST_NAMES + 1):
            trireme.log_metrics({f"m{number}": 1})


def test_a_dict_has_the_loss_and_metrics_that_weigh_as_many_records_as_they_are_of() -> None:
    found = {"loss": 2.0, "accuracy": torch.tensor(0.25), "n": float("nan")}
    logged: dict[str, Logged] = {}
    add(logged, metrics_beside(found), 8.0)
    add(logged, metrics_beside({"loss": 1.0, "accuracy": 1}), 2.0)
    assert (loss_in(found), loss_in(3.0)) == (2.0, 3.0)
    assert logged == {"accuracy": Logged(4.0, 10.0, 0.25, 1.0)}
    assert metrics_beside(3.0) == {}
    with pytest.raises(InvalidArgument, match='a dict with accuracy; its entry "loss" is what is trained'):
        loss_in({"accuracy": 1.0})


def test_learning_rates_of_several_groups_are_numbered() -> None:
    assert (rate_names(0), rate_names(1), rate_names(2)) == ([], ["lr"], ["lr.0", "lr.1"])


def test_the_import_loads_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys, trireme; trireme.log_metrics({'a': 1}); print({'torch', 'pydantic'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "set()\n"

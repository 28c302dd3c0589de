"""Schedulers and the settings that they need; ReduceLROnPlateau as JSON."""

from __future__ import annotations

import json
import math

import pytest
import torch
from pydantic import ValidationError

import trireme
from tests.trainer_agent.scripts import spec_for, write_script
from trainer_agent.model.compute import BeforeStep
from trainer_agent.model.schedule import Schedule
from trireme.config import ConfigError
from trireme_shared.protocol.errors import Gone, InvalidArgument
from trireme_shared.protocol.evaluations import Evaluation, EvaluationStatus, check_criteria, plateau_value
from trireme_shared.protocol.records.step import LaneZero

PLATEAU = (
    "def scheduler(optimizer):\n"
    "    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)\n"
)
STEP = "def scheduler(optimizer):\n    return torch.optim.lr_scheduler.StepLR(optimizer, 2)\n"


@pytest.fixture
def spec(tmp_path):
    script = write_script(tmp_path)

    def made(**values):
        return spec_for(script, evaluation_dataset=spec_for(script).dataset, **values)

    return made


@pytest.fixture
def evaluated(spec):
    """Settings of a job that tells its scheduler the loss."""
    return {"evaluate_every": 2, "plateau_metric": "loss", "evaluation_dataset": spec().dataset}


def test_a_plateau_is_handed_over_with_its_infinite_numbers(build, evaluated):
    one, other = (build(evaluated, scheduler=PLATEAU) for _ in range(2))
    first = LaneZero.model_validate_json(one.initial_lane_zero().to_bytes())
    one.restore(first)  # the best value is infinite before the first one
    values = [2.0, 1.0, None, 1.0, math.nan, 1.5]
    for value in values[:3]:
        handed = one.begin_step(BeforeStep(metric=value))
    other.restore(LaneZero.model_validate(json.loads(handed.model_dump_json())))
    rest = [[each.begin_step(BeforeStep(metric=value)) for value in values[3:]] for each in (one, other)]
    assert rest[0] == rest[1]
    plain = torch.optim.lr_scheduler.ReduceLROnPlateau(
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), factor=0.5, patience=1
    )
    for value in values:
        if value is not None:
            plain.step(value)
    assert rest[0][-1].options[0]["lr"] == plain.optimizer.param_groups[0]["lr"] == 0.05


def test_without_a_metric_nothing_counts(build, evaluated):
    compute = build(evaluated, scheduler=PLATEAU)
    before = compute.initial_lane_zero()
    assert compute.begin_step(BeforeStep(epoch_ended=True)) == before


@pytest.mark.parametrize(
    ("scheduler", "values", "message"),
    [
        (PLATEAU, {}, "plateau_metric is not set"),
        (PLATEAU, {"mode": "async"}, "which only synchronous jobs have"),
        (STEP, "evaluated", "plateau_metric is loss, but the scheduler is StepLR"),
        ("", "evaluated", "plateau_metric is loss, but there is no scheduler"),
    ],
)
def test_a_scheduler_that_the_settings_do_not_fit_is_refused(build, evaluated, scheduler, values, message):
    with pytest.raises(InvalidArgument, match=message) as caught:
        build(evaluated if values == "evaluated" else values, scheduler=scheduler)
    assert caught.value.hint


def test_settings_that_do_not_fit_each_other_are_refused(spec):
    with pytest.raises(
        ValidationError, match=r"plateau_metric is loss, but nothing is evaluated .*; set evaluate_every"
    ):
        spec(plateau_metric="loss")
    with pytest.raises(ValidationError, match="plateau_metric is loss, which only synchronous jobs can have"):
        spec(plateau_metric="loss", mode="async")
    with pytest.raises(ConfigError, match=r"plateau_metric = 'loss:min': give the name of a metric alone"):
        trireme.Config(plateau_metric="loss:min")
    assert trireme.Config(plateau_metric="loss", schedule_per="epoch").to_dict() == {
        "plateau_metric": "loss",
        "schedule_per": "epoch",
    }


def test_a_metric_that_no_evaluation_has_is_refused(spec):
    fitting = spec(evaluate_every=2, plateau_metric="accuracy")
    check_criteria(fitting, {"accuracy": math.nan})
    with pytest.raises(
        InvalidArgument, match="plateau_metric is accuracy, and an evaluation has the metrics loss, rate"
    ):
        check_criteria(fitting, {"loss": 1.0, "rate": 2.0})
    check_criteria(spec(), {})
    several = spec(evaluate_every=2, keep_best="acc:max", stop_early="los:min")
    with pytest.raises(
        InvalidArgument, match="keep_best is acc, stop_early is los, and an evaluation has the metrics loss"
    ):
        check_criteria(several, {"loss": 1.0})


def test_a_scheduler_that_raises_is_the_users_error(spec):
    def guard(code, *arguments):
        raise KeyError(code.__name__)

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = Schedule(torch.optim.lr_scheduler.ConstantLR(optimizer), spec(), guard)
    with pytest.raises(KeyError, match="step"):
        schedule.after_step()


def done(number: int, **values) -> Evaluation:
    return Evaluation(number=number, step=number * 2, timeline=0, checkpoint="c", **values)


def test_what_a_plateau_is_told_at_the_version_of_an_evaluation():
    first, second, lost = (
        done(1, metrics={"loss": 3.0}),
        done(2, metrics={"loss": 2.0}),
        done(3, left_out="damaged"),
    )
    status = EvaluationStatus(settled=2, recent=(first, second))
    assert plateau_value(EvaluationStatus(), 1, "loss") is None  # there is none before
    assert (plateau_value(status, 2, "loss"), plateau_value(status, 3, "loss")) == (3.0, 2.0)
    assert math.isnan(plateau_value(status, 3, "accuracy"))
    status = EvaluationStatus(settled=3, recent=(second, lost))
    assert plateau_value(status, 4, "loss") is None
    # never begun
    assert plateau_value(EvaluationStatus(settled=3, recent=(first, second)), 4, "loss") is None
    with pytest.raises(Gone, match="the result of evaluation 1 is forgotten, 3 are over; join again"):
        plateau_value(status, 2, "loss")
    assert plateau_value(status, 2, "loss", first) == 3.0
    with pytest.raises(Gone):
        plateau_value(status, 2, "loss", lost)

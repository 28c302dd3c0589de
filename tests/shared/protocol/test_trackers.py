"""The setting `trackers`: texts, tables, what is refused and why."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from trireme.validation import field_problems
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.job_choices import Tracker

SPEC = {"job": "a", "script": "/s.py", "storage": "/x", "dataset": {"kind": "text_lines", "urls": ["x"]}}


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        ("csv, tensorboard", ["csv", "tensorboard"]),
        (["csv", {"kind": "mlflow", "experiment": "digits"}], ["csv", "mlflow"]),
        (["my.module:Tracker"], ["my.module:Tracker"]),
        ({"kind": "csv"}, ["csv"]),
        ((), []),
    ],
)
def test_trackers_are_given_as_texts_and_tables(given: object, kinds: list[str]) -> None:
    spec = JobSpec.model_validate({**SPEC, "trackers": given})
    assert [tracker.kind for tracker in spec.trackers] == kinds
    assert JobSpec.model_validate_json(spec.to_bytes()) == spec


def test_options_are_written_as_in_a_url() -> None:
    assert Tracker.model_validate(
        "mlflow?experiment=digits&run=first&uri=http%3A%2F%2Fhost%3A5000"
    ) == Tracker(kind="mlflow", experiment="digits", run="first", uri="http://host:5000")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("cvs", "there is no tracker 'cvs'; there are csv, tensorboard, mlflow, wandb, and pkg.mod:Name"),
        ("csv,csv", "the tracker csv is there twice"),
        ("csv?experiment=x", "the tracker csv has no experiment"),
        ("mlflow?name=x", "Extra inputs are not permitted"),
        ("mlflow?experiment", "names are uri, experiment, run"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: str, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem.replace("?", r"\?")):
        JobSpec.model_validate({**SPEC, "trackers": given})


def test_credentials_are_refused_and_not_shown() -> None:
    [problem] = field_problems({"trackers": "mlflow?uri=https://me:hunter2@host"}, {"trackers": "--tracker"})
    assert "uri has credentials" in problem
    assert "MLFLOW_TRACKING_PASSWORD" in problem
    assert "hunter2" not in problem


def test_only_a_master_can_feed_trackers() -> None:
    with pytest.raises(ValidationError, match="which only jobs with a master can have"):
        JobSpec.model_validate({**SPEC, "trackers": "csv", "dispatch": "etcd"})

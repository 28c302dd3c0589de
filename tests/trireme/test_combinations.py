"""Each setting in each mode and strategy: it is used, refused, or told to change nothing."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from trireme.validation import field_problems
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.datasets import MapStyle, TextLines
from trireme_shared.protocol.records.job_spec import JobSettings
from trireme_shared.protocol.records.setting_effects import without_effect

BASIC: dict[str, Any] = {
    "job": "j",
    "script": "s",
    "storage": "d",
    "dataset": TextLines("a.txt"),
    "evaluation_dataset": TextLines("b.txt"),
    "global_batch_size": 64,
}
KINDS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"mode": "async"},
    "collective": {"strategy": "collective"},
}
NATIVE = {"exchange": "native"}
# a value other than the default, and the settings that it needs
GIVEN: dict[str, tuple[Any, dict[str, Any]]] = {
    "dataset": (TextLines("c.txt"), {}),
    "evaluation_dataset": (TextLines("c.txt"), {}),
    "dispatch": ("etcd", {}),
    "epochs": (2, {}),
    "global_batch_size": (128, {}),
    "lanes": (16, {}),
    "seed": (1, {}),
    "trainers": (3, {}),
    "pservers": (2, {}),
    "min_members": (2, {}),
    "exchange": ("native", {}),
    "backend": ("gloo", NATIVE),
    "reduction": ("fast", NATIVE),
    "bucket_bytes": (1 << 20, NATIVE),
    "restart_policy": ("never", {}),
    "restart_delay_s": (1.0, {}),
    "records_per_task": (8, {}),
    "block_bytes": (1024, {}),
    "slot_count": (256, {}),
    "push_every": (2, {}),
    "pull_every": (2, {}),
    "lr_staleness_modulation": (True, {}),
    "max_staleness": (3, {}),
    "lr_scale": ("linear", {"lr_base_batch_size": 32}),
    "lr_base_batch_size": (32, {"lr_scale": "sqrt"}),
    "clip_grad_norm": (1.0, {}),
    "clip_lane_norm": (1.0, {}),
    "grad_norm_every": (3, {}),
    "on_nonfinite": ("skip", {}),
    "precision": ("bf16", {}),
    "schedule_per": ("epoch", {}),
    "plateau_metric": ("loss", {"evaluate_every": 2}),
    "threads_per_trainer": (2, {}),
    "device": ("cuda", {}),
    "deterministic": (False, {}),
    "shuffle": (False, {}),
    "lease_ttl_s": (7.0, {}),
    "join_window_s": (0.5, {}),
    "stragglers": ("off", {}),
    "rebalance_s": (5.0, {}),
    "straggler_factor": (3.0, {}),
    "task_timeout_floor_s": (20.0, {}),
    "task_timeout_ceiling_s": (200.0, {}),
    "max_task_failures": (2, {}),
    "max_discarded_fraction": (0.5, {}),
    "max_user_failures": (2, {}),
    "checkpoint_every_steps": (5, {}),
    "checkpoint_every_epochs": (2, {}),
    "keep_checkpoints": (3, {}),
    "deltas_per_base": (3, {}),
    "snapshot_bytes": (1 << 21, {}),
    "evaluate_every": (2, {}),
    "keep_best": ("loss:min", {"evaluate_every": 2}),
    "stop_early": ("loss:min", {"evaluate_every": 2}),
    "checkpoint_checksum": ("md5", {}),
    "checkpoint_every_seconds": (30.0, {}),
    "checkpoint_kind": ("independent", {}),
    "skip_after_seconds": (1.0, {}),
    "gradient_dtype": ("bfloat16", {}),
    "parameter_dtype": ("bfloat16", {}),
    "error_feedback": (True, {"gradient_dtype": "bfloat16"}),
    "recovery_timeout_s": (60.0, {}),
    "init_from": ("a.pt", {}),
    "init_partial": (True, {"init_from": "a.pt"}),
    "init_optimizer": (True, {"init_from": "a.pt"}),
    "pre_tasks": ("true", {}),
    "post_tasks": ("true", {}),
    "trackers": ("csv", {}),
    "changed_files": ("report", {}),
    "drop_last": (True, {}),
    "data_workers": (2, {"dataset": MapStyle("script:dataset", records=8)}),
}
ONLY_ASYNC = {
    *("push_every", "lr_staleness_modulation", "max_staleness"),
    *("checkpoint_kind", "skip_after_seconds", "error_feedback"),
}
ONLY_COLLECTIVE = {"min_members", "exchange", "backend", "reduction", "bucket_bytes"}
REFUSED = {
    "sync": ONLY_ASYNC | ONLY_COLLECTIVE,
    "async": ONLY_COLLECTIVE | {"plateau_metric"},
    "collective": ONLY_ASYNC | {"pservers", "parameter_dtype"},
}
TOLD = {
    "sync": {"checkpoint_every_seconds", "pull_every"},
    "async": {"lanes", "grad_norm_every", "deterministic", "checkpoint_every_steps", "rebalance_s"},
    "collective": {"checkpoint_every_seconds", "pull_every", "deltas_per_base"},
}


def test_every_setting_is_looked_at() -> None:
    assert GIVEN.keys() == JobSettings.model_fields.keys() - {"mode", "strategy"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_setting_is_used_or_refused_or_told_with_both_values(kind: str) -> None:
    for name, (value, others) in GIVEN.items():
        given = BASIC | KINDS[kind] | others | {name: value}
        if name in REFUSED[kind]:
            with pytest.raises(ValidationError) as refused:
                JobSpec.model_validate(given)
            told = str(refused.value)
            assert "leave it out" in told, name
            assert name in told or "exchange" in told, name
            assert "mode" in told or "strategy" in told, name
            continue
        sentences = without_effect(JobSpec.model_validate(given))
        assert len(sentences) == (name in TOLD[kind]), name
        for sentence in sentences:
            assert sentence.startswith(f"{name} is {value}, which changes nothing: ")
            assert "mode is" in sentence or "strategy is" in sentence


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"stop_early": "loss:min"}, ("stop_early is loss:min, but .*evaluate_every is not set; set "
                "evaluate_every, too, or leave stop_early out")),
        ({"keep_best": "loss:min"}, "keep_best is loss:min, but nothing is evaluated"),
        ({"plateau_metric": "loss"}, "plateau_metric is loss, but nothing is evaluated"),
        ({"evaluate_every": 3, "evaluation_dataset": None},
         "evaluate_every is 3, but there is no evaluation dataset"),
        ({"init_partial": True}, "init_partial is set, but there is no init_from"),
        ({"lr_base_batch_size": 3}, "lr_base_batch_size is 3, and lr_scale is none"),
        ({"backend": "gloo", "strategy": "collective"}, "backend is gloo, .* and exchange is direct"),
        ({"dispatch": "etcd", "trackers": "csv"}, "trackers are set, which only jobs with a master can have"),
    ],
)  # fmt: skip
def test_a_setting_that_lacks_another_one_is_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        JobSpec.model_validate(BASIC | given)


@pytest.mark.parametrize(
    ("given", "name", "why"),
    [
        ({"straggler_factor": 3.0, "stragglers": "off"}, "straggler_factor is 3.0", "stragglers is off"),
        ({"grad_norm_every": 3, "clip_grad_norm": 2.0}, "grad_norm_every is 3",
         "clip_grad_norm is 2, so the norm is known in each step"),
        ({"error_feedback": True, "mode": "async"}, "error_feedback is True",
         "gradient_dtype is float32, so no gradient is rounded"),
        ({"checkpoint_every_epochs": 3, "mode": "async", "checkpoint_kind": "independent"},
         "checkpoint_every_epochs is 3",
         "checkpoint_kind is independent, whose checkpoints follow checkpoint_every_seconds alone"),
        ({"restart_delay_s": 3.0, "restart_policy": "never"}, "restart_delay_s is 3.0",
         "restart_policy is never"),
    ],
)  # fmt: skip
def test_a_setting_that_another_one_makes_idle_is_told(given: dict[str, Any], name: str, why: str) -> None:
    assert without_effect(JobSpec.model_validate(BASIC | given)) == [
        f"{name}, which changes nothing: {why}; leave it out"
    ]
    assert not without_effect(JobSpec.model_validate(BASIC))


def test_what_a_script_sets_may_be_completed_by_the_command_line() -> None:
    for given in (
        {"init_partial": True},
        {"init_optimizer": True},
        {"stop_early": "loss:min"},
        {"push_every": 2},
    ):
        assert field_problems(given) == []

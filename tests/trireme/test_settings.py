"""Settings: flag > environment > trireme.toml > the script's config > default, and clear words for what
cannot be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

import trireme
from trireme.config import ConfigError
from trireme.settings import (
    CALLED,
    ELSEWHERE,
    LAUNCHER_SETTINGS,
    SETTINGS,
    Setting,
    UsageError,
    advice_on,
    check_fields,
    from_assignments,
    from_environment,
    from_flags,
    from_script,
    from_set,
    from_toml,
    job_name,
    job_spec,
    merge,
    outside_script,
)
from trireme_shared.platform.storage.tensor_file import CHECKSUMS
from trireme_shared.protocol.records import JobSpec, Mode

FIXED = {"script": "/s.py", "storage": "/d", "dataset": {"kind": "text_lines", "urls": ["x"]}}


def spec_of(*sources):
    return job_spec(merge([*sources, from_flags({"job": "j"})]), **FIXED)


def test_the_strongest_source_wins(tmp_path):
    toml = tmp_path / "trireme.toml"
    toml.write_text('epochs = 3\nseed = 3\nmode = "async"\n')
    spec = spec_of(
        from_flags({"epochs": 1, "seed": None}),
        from_environment({"TRIREME_EPOCHS": "2", "TRIREME_SEED": "2", "TRIREME_LANES": "", "HOME": "/"}),
        from_toml(toml),
        from_script({"epochs": 4, "seed": 4, "mode": "sync", "pservers": 4}),
    )
    assert (spec.epochs, spec.seed, spec.mode, spec.pservers, spec.lanes) == (1, 2, Mode.ASYNC, 4, 8)


def test_a_wrong_value_is_told_with_the_place_it_came_from():
    with pytest.raises(UsageError, match=r"TRIREME_EPOCHS = 'many': input should be a valid integer"):
        spec_of(from_environment({"TRIREME_EPOCHS": "many"}))


def test_lanes_that_are_no_power_of_two_are_refused_with_the_nearest_ones():
    with pytest.raises(UsageError, match=r"lanes must be a power of two, got 6; use 4 or 8 \(from --lanes\)"):
        spec_of(from_flags({"lanes": 6}))


def test_sizes_that_do_not_fit_each_other_name_both_places():
    with pytest.raises(UsageError, match=r"30 is not a multiple of lanes 8.*config global_batch_size"):
        spec_of(from_script({"global_batch_size": 30}))


def test_an_unknown_key_of_trireme_toml_is_refused_with_the_nearest_name(tmp_path):
    toml = tmp_path / "trireme.toml"
    toml.write_text("epoch = 3\n")
    with pytest.raises(UsageError, match=r"no setting 'epoch'; did you mean epochs\?"):
        from_toml(toml)


def test_clip_norm_is_refused_wherever_it_is_given_with_the_names_that_it_has_now(tmp_path):
    both = "clip_grad_norm limits .* clip_lane_norm limits"
    toml = tmp_path / "trireme.toml"
    toml.write_text("clip_norm = 1.0\n")
    with pytest.raises(UsageError, match=both):
        from_toml(toml)
    with pytest.raises(UsageError, match=both):
        from_assignments(["clip_norm=1"])
    with pytest.raises(UsageError, match=both):
        from_environment({"TRIREME_CLIP_NORM": "1"})
    with pytest.raises(ConfigError, match=both):
        trireme.Config(clip_norm=1.0)
    with pytest.raises(ValidationError, match=both):
        JobSpec.model_validate({"clip_norm": 1.0})


def test_a_batch_that_follows_the_members_is_refused_with_the_reason():
    """Lanes, and with them the global batch, are those of the job."""
    with pytest.raises(
        ConfigError, match=r"lanes cannot follow the members: .* give a power of two, for example 8"
    ):
        trireme.Config(lanes="members")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="lanes cannot follow the members"):
        JobSpec.model_validate({"lanes": "members"})


def test_rates_follow_the_global_batch_by_a_rule_and_from_a_base():
    """Records behind a step: all lanes, or (asynchronous) all minibatches of a push."""
    base = {"global_batch_size": 1024, "lr_base_batch_size": 256}
    for scale, factor in (("linear", 4.0), ("sqrt", 2.0)):
        assert spec_of(from_script({**base, "lr_scale": scale})).lr_factor == factor
    assert spec_of(from_script({"global_batch_size": 1024})).lr_factor == 1.0
    pushes = {**base, "lr_scale": "linear", "mode": "async", "push_every": 3}
    assert spec_of(from_script(pushes)).lr_factor == 12.0
    with pytest.raises(
        UsageError, match=r"lr_scale is sqrt, and lr_base_batch_size is not set; .*config lr_scale"
    ):
        spec_of(from_script({"lr_scale": "sqrt"}))
    with pytest.raises(UsageError, match=r"lr_base_batch_size is 256, and lr_scale is none"):
        spec_of(from_script({"lr_base_batch_size": 256}))
    with pytest.raises(ConfigError, match="lr_scale"):
        trireme.Config(lr_scale="cubic")


def test_a_broken_trireme_toml_is_refused(tmp_path):
    toml = tmp_path / "trireme.toml"
    toml.write_text("epochs = = 3\n")
    with pytest.raises(UsageError, match=r"trireme\.toml cannot be read"):
        from_toml(toml)


def test_a_missing_trireme_toml_says_nothing(tmp_path):
    assert from_toml(tmp_path / "trireme.toml").values == {}


def test_assignments_set_any_setting():
    assert from_assignments(["records-per-task=64", "shuffle=false"]) == {
        "records_per_task": "64",
        "shuffle": "false",
    }
    with pytest.raises(UsageError, match="--set lanes: write --set name=value"):
        from_assignments(["lanes"])
    with pytest.raises(UsageError, match="no setting 'colour'"):
        from_assignments(["colour=blue"])


@pytest.mark.parametrize(
    "setting", ["checkpoint_every_steps", "checkpoint_every_epochs", "keep_checkpoints", "evaluate_every"]
)
def test_what_was_given_by_set_is_told_by_that_and_not_by_a_flag_that_does_not_exist(setting):
    with pytest.raises(UsageError, match=rf"--set {setting} = 'x': ") as caught:
        spec_of(from_flags({"epochs": 2}), from_set([f"{setting.replace('_', '-')}=x"]))
    assert f"--{setting.replace('_', '-')}" not in str(caught.value)


def test_set_with_nothing_unsets_what_weaker_sources_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trireme.toml").write_text("clip_grad_norm = 1.0\nepochs = 7\n")
    config = merge([from_script({"clip_grad_norm": 2.0, "pservers": 3, "trackers": "csv"})])
    unset = ["clip_grad_norm=", "epochs=", "pservers=", "trackers="]
    merged = config | outside_script({}, unset)
    check_fields(merged)
    spec = job_spec(merged | {"job": Setting("j", "--job")}, **FIXED)
    assert (spec.clip_grad_norm, spec.epochs, spec.pservers, spec.trackers) == (None, 1, 1, ())
    assert merged["pservers"].value == "auto"
    with pytest.raises(UsageError, match=r"--set job= unsets it, and every job has one: leave it out"):
        outside_script({}, ["job="])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("lr", "the optimizer has it: give it in optimizer(model) of the script"),
        ("weight_decay", "the optimizer has it"),
        ("warmup_steps", "the script's scheduler(optimizer) has it"),
        ("batch_size", "did you mean global_batch_size?"),
        ("max_grad_norm", "did you mean clip_grad_norm?"),
        ("epoch", "did you mean epochs?"),
        ("colour", "known settings: job, mode"),
    ],
)
def test_what_is_no_setting_is_told_where_it_belongs(name, told):
    with pytest.raises(UsageError, match=re.escape(f"there is no setting '{name}'; {told}")):
        from_assignments([f"{name}=1"])


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--lr", "there is no option --lr: the optimizer has it"),
        ("--records-per-task", "is a setting without a flag of its own: use --set records_per_task=VALUE"),
        ("--batch-size", "did you mean --global-batch-size?"),
        ("--max-grad-norm", "did you mean --set clip_grad_norm=VALUE?"),
        ("--epohcs", "did you mean --epochs?"),
    ],
)
def test_an_option_that_a_command_does_not_have_is_told_what_to_use(option, told):
    assert told in advice_on(option, {"--epochs", "--global-batch-size"})
    assert advice_on("--colour-of-it", {"--epochs"}) == ""


def test_other_names_and_places_are_of_settings_that_exist_and_of_none_that_does():
    assert not (ELSEWHERE.keys() | CALLED.keys()) & set(SETTINGS)
    assert set(CALLED.values()) <= {*SETTINGS, *LAUNCHER_SETTINGS}


def test_the_flag_of_a_setting_is_stronger_than_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = outside_script({"epochs": 3}, ["epochs=2", "lanes=4"])
    assert {name: (each.value, each.origin) for name, each in found.items()} == {
        "epochs": (3, "--epochs"),
        "lanes": ("4", "--set lanes"),
    }


def test_a_config_tells_only_what_it_sets():
    assert trireme.Config(lanes=4, global_batch_size=100).to_dict() == {"global_batch_size": 100, "lanes": 4}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lanes": 6}, "lanes must be a power of two, got 6; use 4 or 8"),
        ({"epochs": 0}, "epochs = 0: input should be greater than or equal to 1"),
        ({"mode": "fast"}, "mode = 'fast': input should be 'sync' or 'async'"),
        (
            {"checkpoint_checksum": "crc32"},
            "checkpoint_checksum = 'crc32': input should be 'xxh3-128', 'md5' or 'sha256'",
        ),
    ],
)
def test_a_config_refuses_what_can_never_be(fields, message):
    with pytest.raises(ConfigError) as caught:
        trireme.Config(**fields)
    assert str(caught.value) == f"trireme.Config: {message}"


@pytest.mark.parametrize(
    ("script", "name"),
    [("my_model.py", "my-model"), ("Ctr2.py", "ctr2"), ("_.py", "job"), ("a" * 80 + ".py", "a" * 63)],
)
def test_a_job_is_named_after_its_script(script, name):
    assert job_name(Path(script)) == name


def test_a_job_may_choose_each_checksum_that_parts_can_have():
    assert get_args(JobSpec.model_fields["checkpoint_checksum"].annotation) == tuple(CHECKSUMS)

"""Settings of asynchronous jobs about the age of parameters: from every source, and clear words for what
cannot be."""

from __future__ import annotations

import pytest

import trireme
from tests.trireme.test_settings import spec_of
from trireme.config import ConfigError
from trireme.settings import (
    UsageError,
    check_fields,
    from_assignments,
    from_environment,
    from_flags,
    from_script,
    from_toml,
    merge,
)
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.setting_effects import ACCEPTED

ASYNC = {"mode": "async"}


def test_each_source_can_divide_the_rate_of_late_pushes(tmp_path):
    toml = tmp_path / "trireme.toml"
    toml.write_text('mode = "async"\nlr_staleness_modulation = true\n')
    environment = {"TRIREME_MODE": "async", "TRIREME_LR_STALENESS_MODULATION": "true"}
    given = {**ASYNC, "lr_staleness_modulation": True}
    config = trireme.Config(**given).to_dict()
    for source in (from_flags(given), from_environment(environment), from_toml(toml), from_script(config)):
        check_fields(merge([source]))
        spec = spec_of(source)
        assert spec.lr_staleness_modulation
        assert JobSpec.model_validate_json(spec.to_bytes()) == spec
    assert not spec_of(from_flags(ASYNC)).lr_staleness_modulation
    assert "lr_staleness_modulation" in ACCEPTED


def test_synchronous_jobs_have_no_late_pushes():
    message = (
        "lr_staleness_modulation is True, which only asynchronous jobs can have, and mode is sync; use "
        "mode async or leave it out"
    )
    with pytest.raises(UsageError, match=message):
        spec_of(from_flags({"lr_staleness_modulation": True}))


def test_grads_to_wait_names_its_counterpart(tmp_path):
    toml = tmp_path / "trireme.toml"
    toml.write_text("grads_to_wait = 4\n")
    message = "grads_to_wait is no setting: .* push_every=N is the counterpart"
    for refused in (
        lambda: from_toml(toml),
        lambda: from_environment({"TRIREME_GRADS_TO_WAIT": "4"}),
        lambda: from_assignments(["grads_to_wait=4"]),
    ):
        with pytest.raises(UsageError, match=message):
            refused()
    with pytest.raises(ConfigError, match=message):
        trireme.Config(mode="async", grads_to_wait=4)
    with pytest.raises(ValueError, match=message):
        JobSpec.model_validate({"mode": "async", "grads_to_wait": 4})

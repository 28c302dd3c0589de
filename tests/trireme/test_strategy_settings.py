"""`strategy` and what goes with it: from every source, and clear words for what cannot be."""

from __future__ import annotations

import re

import pytest

import trireme
from tests.trireme.test_settings import spec_of
from trireme.config import ConfigError
from trireme.settings import (
    UsageError,
    check_fields,
    from_environment,
    from_flags,
    from_script,
    from_toml,
    merge,
)
from trireme_shared.protocol.records import JobSpec, Strategy
from trireme_shared.protocol.records.setting_effects import renewed

COLLECTIVE = {"strategy": "collective"}


def test_each_source_can_say_the_strategy_and_such_a_job_has_no_parameter_servers(tmp_path):
    toml = tmp_path / "trireme.toml"
    toml.write_text(
        'strategy = "collective"\nmin_members = 2\nrestart_policy = "on_failure"\nrestart_delay_s = 1.5\n'
    )
    environment = {
        "TRIREME_STRATEGY": "collective",
        "TRIREME_MIN_MEMBERS": "2",
        "TRIREME_RESTART_POLICY": "on_failure",
        "TRIREME_RESTART_DELAY_S": "1.5",
    }
    given = {**COLLECTIVE, "min_members": 2, "restart_policy": "on_failure", "restart_delay_s": 1.5}
    config = trireme.Config(**given).to_dict()
    for source in (from_flags(given), from_environment(environment), from_toml(toml), from_script(config)):
        check_fields(merge([source]))
        spec = spec_of(source)
        assert (spec.strategy, spec.pservers, spec.min_members) == (Strategy.COLLECTIVE, 0, 2)
        assert (spec.restart_policy, spec.restart_delay_s) == ("on_failure", 1.5)
        assert JobSpec.model_validate_json(spec.to_bytes()) == spec


def test_jobs_have_parameter_servers_unless_they_say_otherwise():
    spec = spec_of(from_flags({}))
    assert (spec.strategy, spec.pservers, spec.min_members) == (Strategy.PARAMETER_SERVER, 1, 1)
    assert (spec.restart_policy, spec.restart_delay_s) == ("always", 0.0)
    assert spec_of(from_flags({**COLLECTIVE, "pservers": "auto"})).pservers == 0


@pytest.mark.parametrize(
    ("flags", "config", "message"),
    [
        (COLLECTIVE, {"mode": "async"}, ("strategy is collective, which only synchronous jobs can have, and "
                "mode is async; use mode sync")),
        (COLLECTIVE, {"pservers": 2}, ("pservers is 2, but a job with strategy collective has no parameter "
                "servers; leave it out")),
        ({"pservers": 0}, {}, "pservers is 0: a job needs one at least"),
        (
            COLLECTIVE,
            {"parameter_dtype": "bfloat16"},
            ("parameter_dtype is bfloat16, but with strategy collective no parameters travel in a "
                    "step; leave it out"),
        ),
        ({"min_members": 2}, {}, "min_members is 2, which only jobs with strategy collective can have"),
        ({"exchange": "native"}, {}, ("exchange is native, which only jobs with strategy collective can "
                "have; leave it out")),
        (COLLECTIVE, {"reduction": "fast"}, ("reduction is fast, which only native exchange has, and "
                "exchange is direct; leave it out")),
        (COLLECTIVE, {"bucket_bytes": 1 << 20}, "bucket_bytes is 1048576, which only native exchange has"),
        ({**COLLECTIVE, "backend": "gloo"}, {}, "backend is gloo, which only native exchange has"),
        ({**COLLECTIVE, "exchange": "native", "backend": "mpi"}, {}, "--backend = 'mpi'"),
        ({**COLLECTIVE, "exchange": "native", "bucket_bytes": 10}, {}, "--bucket-bytes = 10"),
        ({"strategy": "gossip"}, {}, ("--strategy = 'gossip': input should be 'parameter_server' or "
                "'collective'")),
        ({"restart_policy": "sometimes"}, {}, "--restart-policy = 'sometimes'"),
        ({"restart_delay_s": -1}, {}, "--restart-delay-s = -1"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_with_both_values(flags, config, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        spec_of(from_flags(flags), from_script(config))


def test_a_problem_names_where_each_setting_was_given():
    with pytest.raises(UsageError, match=r"\(from .*config pservers.*\)") as caught:
        spec_of(from_flags(COLLECTIVE), from_script({"pservers": 2}))
    assert "--strategy" in str(caught.value)


def test_settings_alone_are_refused_only_if_no_other_could_make_them_possible():
    for possible in (
        {"min_members": 5},
        {"min_members": 5, "trainers": 5},
        {**COLLECTIVE, "pservers": 0},
        COLLECTIVE,
    ):
        trireme.Config(**possible)
    for possible in (
        {"exchange": "native"},
        {"reduction": "fast"},
        {"backend": "nccl"},
        {"bucket_bytes": 1 << 20},
    ):
        trireme.Config(**possible)
    with pytest.raises(ConfigError, match="min_members"):
        trireme.Config(min_members=0)
    with pytest.raises(ConfigError, match="which only synchronous jobs can have"):
        trireme.Config(strategy="collective", mode="async")


def test_a_job_that_is_run_again_with_the_other_strategy_gets_its_number_of_parameter_servers():
    before, now = spec_of(from_flags({"pservers": 2})), spec_of(from_flags({**COLLECTIVE, "min_members": 2}))
    changed = renewed(before, now)
    assert (changed.strategy, changed.pservers, changed.min_members) == (Strategy.COLLECTIVE, 0, 2)
    assert JobSpec.model_validate_json(changed.to_bytes()) == changed
    back = renewed(changed, before)
    assert (back.strategy, back.pservers) == (Strategy.PARAMETER_SERVER, 2)
    assert JobSpec.model_validate_json(back.to_bytes()) == back

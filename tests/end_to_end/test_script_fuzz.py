"""Some of the scripts of tests/script_fuzz by `trireme run`: processes of their own, and the check before the
run."""

from __future__ import annotations

import json
import random

import pytest
import torch

from tests.script_fuzz.catalogue import CATALOGUE
from tests.script_fuzz.draw import together
from tests.script_fuzz.judge import differences
from tests.script_fuzz.script import Script
from tests.script_fuzz.surfaces import reference

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
PSERVERS, COLLECTIVE = ("--pservers", "1"), ("--set", "strategy=collective")
REFUSED = (
    "max_norm",
    "a rate changed in the loss",
    "float64 state",
    "a hook behind the step",
    "another shape",
)
TOLD = ("a layer that nobody uses, with decay",)


def named(name):
    return next(each for each in CATALOGUE if each.name == name)


def run_by(trireme, script, *, loop, strategy):
    path = script.loop("fuzz_real") if loop else script.functions("fuzz_real")
    return trireme.run(
        "run", path, "--trainers", "1", *strategy, "--data-dir", script.folder / "data", "--json"
    )


def trained(trireme, script, *, loop, strategy):
    done = run_by(trireme, script, loop=loop, strategy=strategy)
    assert done.code == 0, done.err
    return torch.load(json.loads(done.out)["exports"]["state_dict"], weights_only=True), done.err


@pytest.mark.parametrize(
    ("seed", "loop", "strategy"),
    [
        (0, False, PSERVERS),
        *(
            pytest.param(seed, loop, strategy, marks=pytest.mark.soak)
            for seed, (loop, strategy) in enumerate(
                [(loop, strategy) for strategy in (PSERVERS, COLLECTIVE) for loop in (True, False)] * 3, 1
            )
        ),
    ],
)
def test_trained_ones_have_the_bits_of_plain_pytorch(tmp_path, trireme, seed, loop, strategy):
    free = [
        each
        for each in CATALOGUE
        if not each.is_single and each.in_loops_only == (loop and bool(seed % 2))
        if not (loop and each.loop_names)
    ]
    script = Script(tmp_path, together(random.Random(seed), free, 6))
    found, _ = trained(trireme, script, loop=loop, strategy=strategy)
    expected, _ = reference(script)
    assert differences(found, expected) == []


@pytest.mark.soak
@pytest.mark.parametrize("strategy", [PSERVERS, COLLECTIVE], ids=["parameter servers", "collective"])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_ones_end_with_the_name(tmp_path, trireme, name, strategy):
    mutation = named(name)
    done = run_by(trireme, Script(tmp_path, (mutation,)), loop=False, strategy=strategy)
    assert done.code != 0
    assert any(word.lower() in done.err.lower() for word in mutation.names), done.err
    assert "trainer_agent/" not in done.err


@pytest.mark.soak
@pytest.mark.parametrize("name", TOLD)
def test_what_a_step_does_otherwise_is_told_on_the_terminal(tmp_path, trireme, name):
    mutation = named(name)
    _, said = trained(trireme, Script(tmp_path, (mutation,)), loop=False, strategy=PSERVERS)
    assert any(word in said for word in mutation.names)

"""Scripts that differ from a plain one in many ways: each is trained as plain PyTorch trains it, or refused
by name, on every surface."""

from __future__ import annotations

import random

import pytest

from tests.equipment.replaced import replaced
from tests.script_fuzz.catalogue import CATALOGUE
from tests.script_fuzz.draw import covering, drawn
from tests.script_fuzz.judge import NoScript, judge
from tests.script_fuzz.mutation import Mutation
from tests.script_fuzz.script import Script
from tests.script_fuzz.surfaces import quiet
from trainer_agent.model import flat
from trainer_agent.model.optimizer import OptimizerWatch
from trainer_agent.model.watch.minibatch_rules import MissingGradients
from trainer_agent.model.watch.unshared_state import UnsharedState

SHARES = 8  # so that several processes of a test run have some
SOAKED = 500
IN_CI = 48


pytestmark = pytest.mark.timeout(600)  # on a busy machine


def wrong_ones(folder, scripts, *, in_parts=False):
    found, left_out = {}, 0
    for number, mutations in enumerate(scripts):
        (own := folder / str(number)).mkdir()
        try:
            with quiet():
                wrong = judge(Script(own, mutations), number if in_parts else None)
        except NoScript:
            left_out += 1
            continue
        if wrong:
            found[" + ".join(each.name for each in mutations)] = wrong
    assert left_out <= max(1, len(scripts) / 20)
    return found


def mutation(name):
    return next(each for each in CATALOGUE if each.name == name)


def some_of_the_covering():
    """All that have several mutations, and as many of the others as make IN_CI: evenly, from all parts of the
    catalogue."""
    scripts = covering(random.Random(0))
    several, single = (
        [each for each in scripts if len(each) > 1],
        [each for each in scripts if len(each) == 1],
    )
    wanted = IN_CI - len(several)
    return several + [single[number * len(single) // wanted] for number in range(wanted)]


@pytest.mark.parametrize("share", range(SHARES))
def test_scripts_are_trained_as_by_plain_pytorch_or_refused_by_name(tmp_path, share):
    """On a part of the surfaces; the soaks have all of them, and each mutation."""
    scripts = some_of_the_covering()
    assert len(scripts) == IN_CI
    assert wrong_ones(tmp_path, scripts[share::SHARES], in_parts=True) == {}


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_so_is_every_mutation(tmp_path):
    assert wrong_ones(tmp_path, covering(random.Random(0))) == {}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2])
def test_so_are_those_that_are_drawn(tmp_path, seed):
    assert wrong_ones(tmp_path, drawn(seed, SOAKED)) == {}


def test_every_mutation_is_in_what_is_drawn():
    scripts = drawn(3, SOAKED)
    assert len(scripts) == SOAKED
    assert {each.name for script in scripts for each in script} == {each.name for each in CATALOGUE}
    assert len({each.name for each in CATALOGUE}) == len(CATALOGUE)


@pytest.mark.parametrize(
    ("owner", "guard", "without", "name"),
    [
        (UnsharedState, "change", lambda _: "", "a parameter clamped in forward"),
        (OptimizerWatch, "change", lambda _: "", "a rate changed in the loss"),
        (flat, "check_has_not_begun", lambda *_: None, "an optimizer that has stepped"),
        (MissingGradients, "minibatch", lambda *_: None, "a layer that is used now and then"),
        (flat.nn.Module, "modules", lambda _: iter(()), "expanded buffer"),
    ],
)
def test_a_guard_that_is_taken_away_is_missed(tmp_path, owner, guard, without, name):
    with replaced(owner, guard, without):
        assert wrong_ones(tmp_path, [(mutation(name),)]) != {}


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (
            {"loss": "if __name__ != 'plain':\n    value = value * 1.5"},
            "trained in silence, and differs in first.weight",
        ),
        (
            {
                "names": ("elephant",),
                "init": "self.t = nn.Embedding(2, 8, max_norm=0.1)",
                "forward": "h = h + self.t(torch.zeros(len(x), dtype=torch.int64))",
            },
            "refused, without one of",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path, part, problem):
    with quiet():
        wrong = judge(Script(tmp_path, (Mutation("wrong", **part),)))
    assert any(problem in text for text in wrong.values()), wrong

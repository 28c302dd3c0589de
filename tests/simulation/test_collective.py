"""Collective jobs in the simulation: every promise is kept whatever fails, and each safeguard, switched off, is missed."""

from __future__ import annotations

import pytest

from shared.records import Mode
from tests.simulation.collective import collective_plan
from tests.simulation.collective_ablations import ABLATIONS
from tests.simulation.collective_moments import MOMENTS, play
from tests.simulation.run import simulate

FEW, MANY = 2, 320
MENDED = (257, 259, 296)  # what they showed once may not come again

# the moment, and seeds known to show what is missing; a seed may change its meaning when the product changes, so more are tried
SHOWN = {
    "kept means": ("torn", 19),
    "statements": ("torn", 19),
    "fence before statements": ("late", 17),
    "steps made again": ("acked", 4),
    "generation": ("torn", 0),
    "pulls thrown away": ("torn", 0),
    "numbers never repeat": ("torn", 0),
    "verdict before a generation": ("parted", 0),
}
MOST_SEEDS = 40


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(FEW), id="few"),
        pytest.param(MENDED, id="mended"),
        pytest.param(range(FEW, MANY), id="many", marks=[pytest.mark.soak, pytest.mark.timeout(1200)]),
    ],
)
def test_every_promise_is_kept_without_parameter_servers(seeds):
    for seed in seeds:
        outcome = simulate(seed, Mode.SYNC, plan=collective_plan(seed))
        assert not outcome.violations, f"\n  {outcome}"


@pytest.mark.soak
@pytest.mark.parametrize("name", list(MOMENTS))
def test_a_generation_may_end_at_any_moment(name):
    for seed in range(MOST_SEEDS):
        broken = [line for line in play(name, seed).violations if line != "nothing has happened"]
        assert not broken, f"{name}, seed {seed}: {broken}"


def test_every_ablation_is_tried():
    assert SHOWN.keys() == ABLATIONS.keys()


@pytest.mark.parametrize("name", list(SHOWN))
def test_the_simulation_misses_the_safeguard(name):
    moment, first = SHOWN[name]
    for seed in range(first, first + MOST_SEEDS):
        with ABLATIONS[name]():
            broken = [line for line in play(moment, seed).violations if line != "nothing has happened"]
        if broken and not play(moment, seed).violations:
            return
    pytest.fail(f"{MOST_SEEDS} seeds ran without the safeguard {name!r}, and no promise was broken for lack of it")

"""Each safeguard, switched off, must be missed: the simulation finds a broken promise within so many seeds."""

from __future__ import annotations

import pytest

from shared.records import Mode
from tests.simulation.ablations import ABLATIONS
from tests.simulation.play import play

# (mode, first seed known to show it); a seed may change its meaning when the product changes, so more are tried
SHOWN = {
    "term": (Mode.SYNC, 0),
    "attempt": (Mode.SYNC, 40),
    "generation": (Mode.SYNC, 0),
    "tree": (Mode.SYNC, 10),
    "ledger": (Mode.ASYNC, 0),
}
MOST_SEEDS = 300


def test_every_ablation_is_tried():
    assert SHOWN.keys() == ABLATIONS.keys()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", list(SHOWN))
def test_the_simulation_misses_the_safeguard(name):
    mode, first = SHOWN[name]
    with ABLATIONS[name]():
        for seed in range(first, first + MOST_SEEDS):
            if play(seed, mode).broken:
                break
        else:
            pytest.fail(f"{MOST_SEEDS} seeds ran without the safeguard {name!r}, and no promise was broken")
    assert not play(seed, mode).broken, "with the safeguard the same seed is sound"

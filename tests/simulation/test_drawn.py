"""Jobs of drawn settings that break at moments of their own: while they evaluate, end, export, save, go back,
or get more epochs."""

from __future__ import annotations

import pytest

from tests.simulation.drawn import drawn_plan
from tests.simulation.run import simulate
from trireme_shared.protocol.records import Dispatch, Mode

FIRST, FEW, MANY, CHUNK = 4, 2, 404, 50
REGRESSIONS = {
    (Mode.ASYNC, 94): "a trainer that had not heard of a roll-back took a task of training for the export",
    (Mode.ASYNC, 515): "the checkpoint of an evaluation was deleted behind a roll-back",
}


def play(seed: int, mode: Mode, dispatch: Dispatch = Dispatch.MASTER) -> None:
    outcome = simulate(seed, mode, plan=drawn_plan(seed, mode, dispatch), dispatch=dispatch)
    assert not outcome.violations, f"\n  {outcome} --drawn"


@pytest.mark.parametrize("dispatch", list(Dispatch))
@pytest.mark.parametrize("mode", list(Mode))
def test_every_promise_is_kept_whatever_the_settings_are(mode: Mode, dispatch: Dispatch) -> None:
    for seed in range(FIRST, FIRST + FEW):
        play(seed, mode, dispatch)


@pytest.mark.parametrize(("mode", "seed"), REGRESSIONS)
def test_what_was_mended_stays_mended(mode: Mode, seed: int) -> None:
    play(seed, mode)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(FIRST, MANY, CHUNK))
@pytest.mark.parametrize("dispatch", list(Dispatch))
@pytest.mark.parametrize("mode", list(Mode))
def test_every_promise_is_kept_in_many_seeds(mode: Mode, dispatch: Dispatch, first: int) -> None:
    for seed in range(first, first + CHUNK):
        play(seed, mode, dispatch)

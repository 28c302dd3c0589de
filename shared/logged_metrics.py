"""`trireme.log_metrics`: what a script reports while its `loss` runs, and who collects it.

trainer: with collected() as found: loss(model, batch)          script: trireme.log_metrics({"accuracy": ...})

Imported by scripts, so it imports neither torch nor pydantic.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from shared.errors import InvalidArgument

MOST_NAMES = 32
NAME = r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$"
LOSS, EVALUATION = "loss", "evaluation."  # names that the job itself uses


class Logged(NamedTuple):
    """Of one name: the sum of the values, how many there were, the smallest and the largest."""

    total: float
    weight: float
    least: float
    most: float

    def plus(self, other: Logged) -> Logged:
        total, weight = self.total + other.total, self.weight + other.weight
        return Logged(total, weight, min(self.least, other.least), max(self.most, other.most))


_collecting: ContextVar[dict[str, Logged] | None] = ContextVar("collecting", default=None)


def log_metrics(values: Mapping[str, Any]) -> None:
    """Report numbers of this minibatch: `trireme.log_metrics({"accuracy": right / len(batch)})`. Call it in `loss`.

    `values`: name -> int, float, or a tensor with one element. Of each step the mean over all minibatches is kept, with the smallest
    and the largest value, beside the checkpoints. Values that are not finite are left out. Without a trainer (`python script.py`,
    `evaluate`) the values are checked, and nothing else happens.
    Raises InvalidArgument: a name that is none, or is the job's own; a value that is no number; more than 32 names in a minibatch.
    """
    found = {name: _number(name, value) for name, value in values.items()}
    collected = _collecting.get()
    if len(found.keys() | (collected or {}).keys()) > MOST_NAMES:
        raise InvalidArgument(f"log_metrics got more than {MOST_NAMES} names in one minibatch; report fewer")
    if collected is None:
        return
    for name, number in found.items():
        if math.isfinite(number):
            one, before = Logged(number, 1.0, number, number), collected.get(name)
            collected[name] = before.plus(one) if before else one


@contextmanager
def collected() -> Iterator[dict[str, Logged]]:
    """What is logged in the block, in this thread."""
    found: dict[str, Logged] = {}
    before = _collecting.set(found)
    try:
        yield found
    finally:
        _collecting.reset(before)


def _number(name: object, value: Any) -> float:
    """Raises InvalidArgument."""
    if not isinstance(name, str) or not re.match(NAME, name):
        msg = (
            f"log_metrics got the name {name!r:.80}; letters, digits and . _ - are possible, a letter first, at most 64"
        )
        raise InvalidArgument(msg)
    if name == LOSS or name.startswith(EVALUATION):
        raise InvalidArgument(f"log_metrics got the name {name}, which the job itself uses; choose another one")
    plain = value.detach() if hasattr(value, "detach") else value
    try:
        if isinstance(plain, str | bytes):
            raise TypeError("a text")
        return float(plain)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        msg = f"log_metrics got {value!r:.80} for {name}: it takes numbers, and tensors with one element"
        raise InvalidArgument(msg) from error

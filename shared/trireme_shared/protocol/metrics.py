"""Metrics of a job: the names that the job itself uses, and what a script reports of a minibatch by
`trireme.log`, and who collects it.

script: trireme.log(accuracy=...)                       ─► collected, each value with weight 1
        return {"loss": loss, "accuracy": ...}
            ─► the loss is trained, the others weigh as many records as they are of
trainer: with collected() as found: add(found, metrics_beside(loss(model, batch)), records)

Imported by scripts, so it imports neither torch nor pydantic.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from trireme_shared.protocol.errors import InvalidArgument

MOST_NAMES = 32
NAME = r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$"
LOSS, EVALUATION = "loss", "evaluation."
LEARNING_RATE, GRADIENT_NORM, NONFINITE, SPEED, TIME = (
    "lr",
    "grad_norm",
    "nonfinite",
    "records_per_second",
    "time.",
)
_OWN = frozenset({LOSS, LEARNING_RATE, GRADIENT_NORM, NONFINITE, SPEED})
_OWN_PREFIXES = (EVALUATION, TIME, f"{LEARNING_RATE}.")


def is_own(name: str) -> bool:
    """Whether the job itself uses the name."""
    return name in _OWN or name.startswith(_OWN_PREFIXES)


def is_free_name(name: object) -> bool:
    """Whether a script may call a metric so."""
    return isinstance(name, str) and re.match(NAME, name) is not None and not is_own(name)


def rate_names(groups: int) -> list[str]:
    """Of the learning rates of so many parameter groups."""
    return [LEARNING_RATE] if groups == 1 else [f"{LEARNING_RATE}.{group}" for group in range(groups)]


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


def log(**values: Any) -> None:
    """Report numbers of this minibatch: `trireme.log(accuracy=right / len(batch))`, in `collate`, `loss` or
    what they call.

    The values: int, float, or a tensor with one element. Of each step the mean over all minibatches is kept,
    with the smallest and the largest value, beside the checkpoints. Values that are not finite are left out.
    Where no minibatch is trained (`evaluate`) the values are checked, and nothing else happens. Raises
    InvalidArgument: a name that is none, or is the job's own; a value that is no number; more than 32 names
    in a minibatch.
    """
    log_metrics(values)


def log_metrics(values: Mapping[str, Any]) -> None:
    """As `log`, for names that are no identifiers: `trireme.log_metrics({"top-5": ...})`."""
    collected = _collecting.get()
    add({} if collected is None else collected, values, 1.0)


def add(logged: dict[str, Logged], values: Mapping[str, Any], weight: float) -> None:
    """In place: values that weigh as many records. Raises InvalidArgument."""
    found = {name: _number(name, value) for name, value in values.items()}
    if len(found.keys() | logged.keys()) > MOST_NAMES:
        raise InvalidArgument(f"more than {MOST_NAMES} metrics are logged in one minibatch; log fewer")
    for name, number in found.items():
        if math.isfinite(number * weight):
            one, before = Logged(number * weight, weight, number, number), logged.get(name)
            logged[name] = before.plus(one) if before else one


def loss_in(found: Any) -> Any:
    """The loss in what `loss(model, batch)` returned: itself, or a dict's entry. Raises InvalidArgument."""
    if not isinstance(found, Mapping):
        return found
    if LOSS not in found:
        names = ", ".join(map(str, found)) or "nothing"
        raise InvalidArgument(
            f'loss returned a dict with {names:.200}; its entry "loss" is what is trained: of several losses '
            "their sum; or let optimizer(model) return a dict with an optimizer for each (docs/habits.md)"
        )
    return found[LOSS]


def metrics_beside(found: Any) -> dict[str, Any]:
    """The metrics in what `loss(model, batch)` returned."""
    return (
        {name: value for name, value in found.items() if name != LOSS} if isinstance(found, Mapping) else {}
    )


@contextmanager
def collected() -> Iterator[dict[str, Logged]]:
    """What is logged in the block, in this thread."""
    found: dict[str, Logged] = {}
    before = _collecting.set(found)
    try:
        yield found
    finally:
        _collecting.reset(before)


def collector() -> dict[str, Logged] | None:
    """Where this thread's values go."""
    return _collecting.get()


def collect_in(found: dict[str, Logged] | None) -> None:
    """From now on this thread's values go there."""
    _collecting.set(found)


def _number(name: object, value: Any) -> float:
    """Raises InvalidArgument."""
    if not isinstance(name, str) or not re.match(NAME, name):
        msg = (
            f"a metric has the name {name!r:.80}; letters, digits and . _ - are possible, a letter "
            "first, at most 64"
        )
        raise InvalidArgument(msg)
    if is_own(name):
        raise InvalidArgument(f"a metric has the name {name}, which the job itself uses; choose another one")
    plain = value.detach() if hasattr(value, "detach") else value
    try:
        if isinstance(plain, str | bytes):
            raise TypeError("a text")
        return float(plain)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        msg = f"the metric {name} is {value!r:.80}: it takes numbers, and tensors with one element"
        raise InvalidArgument(msg) from error

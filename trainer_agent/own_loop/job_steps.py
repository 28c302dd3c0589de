"""`trireme.steps_per_epoch` and `trireme.total_steps`: how many steps the job makes, told to its script
before it trains.

trainer           the plan of the job in etcd ─┐
python script.py  the dataset is counted      ─┼─► telling(find) ─► the script asks
inspection        nobody has counted          ─┘    find() may wait

It asks in model(), optimizer(), scheduler(), loss().

Imported by scripts, so it imports neither torch nor pydantic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from trireme_shared.protocol.errors import InvalidArgument

UNCOUNTED = 1000
"""Steps of an epoch in the inspection of a script, which counts nothing."""

TOO_EARLY = "trireme.{name}() is known once the job's dataset is counted"
WHERE = (
    "call it in model(), optimizer(model), scheduler(optimizer) or loss(), not while the module is "
    "imported; in a loop of your own behind "
    "trireme.prepare, or in a function: trireme.prepare(..., scheduler=lambda optimizer: ...)"
)


@dataclass(frozen=True, slots=True)
class JobSteps:
    """`per_epoch`: None: they differ by epoch, in a job that an earlier version of Trireme began. `counted`
    False: made up."""

    per_epoch: int | None
    epochs: int
    counted: bool = True


_find: list[Callable[[], JobSteps]] = []
_place: ContextVar[tuple[int, int] | None] = ContextVar("place_in_training", default=None)


@contextmanager
def telling(find: Callable[[], JobSteps]) -> Iterator[None]:
    """In this block the script is told what `find` returns, in whichever thread it asks."""
    _find.append(find)
    try:
        yield
    finally:
        _find.remove(find)


def known_steps() -> JobSteps | None:
    """None: nobody tells. It may wait for the count."""
    return _find[-1]() if _find else None


@contextmanager
def training_at(place: tuple[int, int] | None) -> Iterator[None]:
    """In this block, in this thread, a minibatch of that step and epoch is computed; None: they are not
    known."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def place_in_training() -> tuple[int, int] | None:
    """Step and epoch of the minibatch under way in this thread, counted from 0; None: there is none, or its
    job is asynchronous."""
    return _place.get()


def steps_per_epoch() -> int:
    """The steps of one epoch, the same number in each.

    Synchronous: updates of the model, exactly; fewer where tasks are discarded. Asynchronous: pushes, if
    every task had as many as the largest one. It waits until the dataset is counted. Raises InvalidArgument
    where it is not known yet.
    """
    return _steps("steps_per_epoch").per_epoch or 0


def total_steps() -> int:
    """The steps of all epochs: `OneCycleLR(optimizer, max_lr=0.1, total_steps=trireme.total_steps())`. See
    `steps_per_epoch`."""
    found = _steps("total_steps")
    return (found.per_epoch or 0) * found.epochs


def _steps(name: str) -> JobSteps:
    # loads torch, which the script has by now
    from trainer_agent.own_loop.turns import running  # noqa: PLC0415

    loop = running()
    if not _find or (loop is not None and not loop.is_prepared):
        raise InvalidArgument(TOO_EARLY.format(name=name), hint=WHERE)
    found = _find[-1]()
    if found.per_epoch is None:
        raise InvalidArgument(
            f"trireme.{name}() is not known: an earlier version of Trireme began this job, whose "
            "epochs differ in their steps",
            hint="give the number, or train in a new job",
        )
    return found

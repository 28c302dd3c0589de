"""Learning rates that follow the global batch, as the settings lr_scale and lr_base_batch_size say.

optimizer(model) ─► each group's rate times JobSpec.lr_factor ─► scheduler(optimizer) ─► steps
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, CyclicLR, OneCycleLR

from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records import JobSpec

T = TypeVar("T")


def scaled(optimizer: T, spec: JobSpec) -> T:
    """In place: the rates of the script's optimizer. Raises InvalidArgument: a scheduler was made of them already."""
    if spec.lr_scale == "none" or not isinstance(optimizer, Optimizer):
        return optimizer
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise InvalidArgument(
            f"lr_scale is {spec.lr_scale}, and the optimizer has a scheduler already, which goes on from the rates without it",
            hint="leave lr_scale out and multiply the rate in the script, or train without a scheduler",
        )
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * spec.lr_factor
    return optimizer


def check_scheduler(scheduler: Any, spec: JobSpec) -> None:
    """Raises InvalidArgument for one whose rates do not come from the optimizer's."""
    if spec.lr_scale == "none":
        return
    for each in _all_of(scheduler):
        if isinstance(each, OneCycleLR | CyclicLR):
            raise InvalidArgument(
                f"lr_scale is {spec.lr_scale}, and {type(each).__name__} has rates of its own, which do not follow the optimizer's",
                hint="leave lr_scale out and give it rates for this global batch, or use a scheduler that multiplies the optimizer's rate",
            )


def sentence(spec: JobSpec) -> str:
    """For people; empty if the rates are the script's."""
    if spec.lr_scale == "none":
        return ""
    return (
        f"learning rates are {spec.lr_factor:.6g} times the script's: {spec.records_per_step} records a step instead of "
        f"{spec.lr_base_batch_size} (lr_scale {spec.lr_scale})"
    )


def stepped_each_time(scheduler: Any) -> Iterator[Any]:
    """With those inside of ChainedScheduler; SequentialLR steps its own in turn."""
    yield scheduler
    if isinstance(scheduler, ChainedScheduler):
        for each in scheduler._schedulers:  # noqa: SLF001  torch has no public name for them
            yield from stepped_each_time(each)


def _all_of(scheduler: Any) -> Iterator[Any]:
    """With those inside of SequentialLR and ChainedScheduler."""
    yield scheduler
    for each in getattr(scheduler, "_schedulers", ()):
        yield from _all_of(each)

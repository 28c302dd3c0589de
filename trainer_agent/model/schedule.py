"""The script's learning-rate scheduler, and when it is stepped.

schedule_per = "step"      step ─► scheduler.step()
schedule_per = "epoch"     the last step of an epoch ─► scheduler.step() ─► the first step of the next one
ReduceLROnPlateau          a version that is evaluated ─► scheduler.step(metric of the evaluation before) ─► the next step
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from shared.errors import InvalidArgument
from shared.records import JobSpec, Mode
from trainer_agent.model.compute import BeforeStep
from trainer_agent.model.optimizer import rate_scale

Guard = Callable[..., Any]


class Schedule:
    """`scheduler`: the script's, or None. `guard` calls it, and makes its exceptions the user's errors."""

    def __init__(self, scheduler: Any, spec: JobSpec, guard: Guard) -> None:
        check_scheduler(scheduler, spec)
        self.scheduler = scheduler
        self._guard = guard
        self._on_plateau = isinstance(scheduler, ReduceLROnPlateau)
        self._per_epoch = spec.schedule_per == "epoch"

    def __repr__(self) -> str:
        return f"<Schedule {type(self.scheduler).__name__} per {'epoch' if self._per_epoch else 'step'}>"

    def before_step(self, before: BeforeStep) -> None:
        """In place: the optimizer's options become those of the step."""
        if self.scheduler is None:
            return
        if self._on_plateau:
            if before.metric is not None:
                self._guard(self.scheduler.step, before.metric)
        elif self._per_epoch and before.epoch_ended:
            self._guard(self.scheduler.step)

    def after_step(self) -> None:
        """The options of the step are read, or used."""
        if self.scheduler is not None and not self._on_plateau and not self._per_epoch:
            self._guard(self.scheduler.step)


def check_scheduler(scheduler: Any, spec: JobSpec) -> None:
    """Raises InvalidArgument for one that the job's settings do not fit."""
    rate_scale.check_scheduler(scheduler, spec)
    metric = spec.plateau_metric
    if not isinstance(scheduler, ReduceLROnPlateau):
        if metric is not None:
            found = "there is no scheduler" if scheduler is None else f"the scheduler is {type(scheduler).__name__}"
            raise InvalidArgument(
                f"plateau_metric is {metric}, but {found}",
                hint="leave plateau_metric out, or return a torch.optim.lr_scheduler.ReduceLROnPlateau",
            )
    elif spec.mode is Mode.ASYNC:
        raise InvalidArgument(
            "ReduceLROnPlateau follows evaluations at the same step in every trainer, which only synchronous jobs have",
            hint="use mode sync, or a scheduler that depends on the step alone, such as CosineAnnealingLR",
        )
    elif metric is None:
        raise InvalidArgument(
            "ReduceLROnPlateau needs a metric of evaluations while the job trains, and plateau_metric is not set",
            hint='set plateau_metric = "loss" (or another metric of the evaluation) and evaluate_every = "epoch" (or a number of steps)',
        )

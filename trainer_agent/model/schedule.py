"""The script's learning-rate scheduler, and when it is stepped.

    schedule_per = "step"      step ─► scheduler.step()
    schedule_per = "epoch"     the last step of an epoch ─► scheduler.step() ─► the first step of the next one
    ReduceLROnPlateau          a version that is evaluated
        ─► scheduler.step(metric of the evaluation before) ─► the next step

Several schedulers are stepped together, at every step, whether their optimizers are or not.

Asynchronous jobs: a trainer makes only some of the pushes, and PushSchedule finds the options of each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from trainer_agent.model import optimizer
from trainer_agent.model.compute import BeforeStep, Compute
from trainer_agent.model.optimizer import encode
from trainer_agent.own_loop.job_steps import known_steps
from trireme_shared.datasets.random_state import drawing
from trireme_shared.protocol.errors import InvalidArgument, UserCodeError
from trireme_shared.protocol.records import JobSpec, Mode
from trireme_shared.protocol.records.step import LaneZero
from trireme_shared.serving.core.asynchronous import STATE_EVERY, newest_at
from trireme_shared.serving.optimizers.own_step import check_scheduler_step
from trireme_shared.serving.optimizers.several import given, named_in

Guard = Callable[..., Any]


class Wanted(NamedTuple):
    """What a LightningModule says of its scheduler: when it is stepped, "step" or "epoch", and the metric
    that ReduceLROnPlateau follows."""

    interval: str = "step"
    monitor: str = ""


_wanted: WeakKeyDictionary[Any, Wanted] = WeakKeyDictionary()
TOO_MANY = "Tried to step "  # torch's words
MAKE_IT_SO = "make it with total_steps=trireme.total_steps() (with schedule_per epoch: the number of epochs)"
STEPS_AT_ONCE = 1000  # of a scheduler, until the trainer looks what else is to do


class Schedulers:
    """Several schedulers, by name; those of a list are "0", "1", ... Their state is one dict by name."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self.named = {name: each for name, each in named.items() if each is not None}

    def __repr__(self) -> str:
        return f"<Schedulers {', '.join(f'{n} {type(each).__name__}' for n, each in self.named.items())}>"

    def state_dict(self) -> dict[str, Any]:
        return {name: each.state_dict() for name, each in self.named.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for the states of others."""
        if state.keys() != self.named.keys():
            msg = f"it has states of {', '.join(state)}, the script has {', '.join(self.named)}"
            raise ValueError(msg)
        for name, each in self.named.items():
            each.load_state_dict(state[name])


def made_by(user: Any, optimizer: torch.optim.Optimizer, seed: int) -> Any:
    """What the script's `scheduler(optimizer)` makes: a scheduler, Schedulers, or None."""
    if not user.has("scheduler"):
        return None
    found = drawing(seed, user.call, "scheduler", given(optimizer))
    named = named_in(found)
    return found if named is None else Schedulers(named)


def each_of(scheduler: Any) -> tuple[Any, ...]:
    if isinstance(scheduler, Schedulers):
        return tuple(scheduler.named.values())
    return () if scheduler is None else (scheduler,)


class Schedule:
    """`scheduler`: the script's, Schedulers, or None. `guard` calls it, and makes its exceptions the user's
    errors."""

    def __init__(self, scheduler: Any, spec: JobSpec, guard: Guard) -> None:
        check_schedulers(scheduler, spec)
        self.scheduler = scheduler
        self._guard = guard
        self._on_plateau = [each for each in each_of(scheduler) if isinstance(each, ReduceLROnPlateau)]
        self._others = [each for each in each_of(scheduler) if not isinstance(each, ReduceLROnPlateau)]
        self._per_epoch = spec.schedule_per == "epoch"

    def __repr__(self) -> str:
        return f"<Schedule {type(self.scheduler).__name__} per {'epoch' if self._per_epoch else 'step'}>"

    def before_step(self, before: BeforeStep) -> None:
        """In place: the optimizer's options become those of the step."""
        for scheduler in self._on_plateau if before.metric is not None else ():
            self._guard(scheduler.step, before.metric)
        if self._per_epoch and before.epoch_ended:
            self._step()

    def after_step(self) -> None:
        """The options of the step are read, or used."""
        if not self._per_epoch:
            self._step()

    def _step(self) -> None:
        """Raises InvalidArgument behind the last step of a scheduler."""
        try:
            for scheduler in self._others:
                self._guard(scheduler.step)
        except UserCodeError as error:
            if TOO_MANY not in str(error):
                raise
            raise InvalidArgument(
                f"the scheduler has come to its end before training: {error.message}; {MAKE_IT_SO}"
            ) from error


def want(scheduler: Any, wanted: Wanted) -> None:
    """From now on a job whose settings say something else is refused."""
    _wanted[scheduler] = wanted


def _check_wanted(scheduler: Any, spec: JobSpec) -> None:
    """Raises InvalidArgument."""
    if (wanted := _wanted.get(scheduler)) is None:
        return
    name, says, now = "schedule_per", wanted.interval, str(spec.schedule_per)
    if isinstance(scheduler, ReduceLROnPlateau):
        name, says, now = "plateau_metric", wanted.monitor, spec.plateau_metric or "not set"
    if says != now:
        msg = f"configure_optimizers returned a {type(scheduler).__name__} for {says!r}, and {name} is {now}"
        raise InvalidArgument(msg, hint=f'set it alike: config = trireme.Config({name}="{says}")')


def check_schedulers(scheduler: Any, spec: JobSpec) -> None:
    """Raises InvalidArgument for one that the job's settings do not fit, or whose state trainers cannot
    share."""
    schedulers = each_of(scheduler)
    for each in schedulers:
        if not callable(getattr(each, "step", None)):
            raise InvalidArgument(
                f"scheduler(optimizer) returned {type(each).__name__}, not a scheduler",
                hint="return one of torch.optim.lr_scheduler, or a list or dict of them",
            )
        optimizer.check_scaled(each, spec)
        _check_wanted(each, spec)
        check_scheduler_step(each)
        encode(each.state_dict())
        check_total_steps(each, spec)
    metric = spec.plateau_metric
    if not any(isinstance(each, ReduceLROnPlateau) for each in schedulers):
        if metric is not None:
            names = ", ".join(type(each).__name__ for each in schedulers)
            found = f"the scheduler is {names}" if names else "there is no scheduler"
            raise InvalidArgument(
                f"plateau_metric is {metric}, but {found}",
                hint="leave plateau_metric out, or return a torch.optim.lr_scheduler.ReduceLROnPlateau",
            )
    elif spec.mode is Mode.ASYNC:
        raise InvalidArgument(
            "ReduceLROnPlateau follows evaluations at the same step in every trainer, which only "
            "synchronous jobs have",
            hint="use mode sync, or a scheduler that depends on the step alone, such as CosineAnnealingLR",
        )
    elif metric is None:
        raise InvalidArgument(
            "ReduceLROnPlateau needs a metric of evaluations while the job trains, and "
            "plateau_metric is not set",
            hint='set plateau_metric = "loss" (or another metric of the evaluation) and evaluate_every '
            '= "epoch" (or a number of steps)',
        )


def check_total_steps(scheduler: Any, spec: JobSpec) -> None:
    """Raises InvalidArgument if a OneCycleLR would come to its end before training does, as far as that is
    known."""
    cycles = [each for each in optimizer.stepped_each_time(scheduler) if isinstance(each, OneCycleLR)]
    steps = known_steps() if cycles else None
    if steps is None or not steps.counted or steps.per_epoch is None:
        return
    total = steps.per_epoch * steps.epochs
    wanted = spec.epochs - 1 if spec.schedule_per == "epoch" else total
    for cycle in cycles:
        if cycle.total_steps < wanted:
            made = f"{total} steps ({steps.epochs} epoch{'s' * (steps.epochs != 1)} of {steps.per_epoch})"
            raise InvalidArgument(
                f"OneCycleLR has total_steps {cycle.total_steps}, and the job makes {made}: it "
                "would come to its end before training does; " + MAKE_IT_SO
            )


async def advance(compute: Compute, steps: int) -> None:
    """Step the scheduler `steps` times, without any training."""
    for number in range(1, steps + 1):
        compute.begin_step(BeforeStep(epoch_ended=True, is_own=False))
        if number % STEPS_AT_ONCE == 0:
            await asyncio.sleep(0)


class PushSchedule:
    """The options of the optimizer for each push of an asynchronous job, of which a trainer makes only some.

        this trainer's push N: states that parameter servers keep ─► the newest one up to N
            ─► the scheduler's steps up to N ─► options
        each STATE_EVERY pushes a push takes the scheduler's state to the parameter servers

    `compute`: its scheduler is as before any step. `known`: states that other trainers' pushes brought.
    `options_change`: that of the job's spec; states with another one are of another schedule, and do not
    count."""

    def __init__(self, compute: Compute, known: Iterable[LaneZero] = (), options_change: int = 0) -> None:
        self._compute, self._change = compute, options_change
        self._known = tuple(state for state in known if state.options_change == options_change)
        self._begun, self._options = -1, LaneZero(options=())

    def __repr__(self) -> str:
        return f"<PushSchedule at push {self._begun}>"

    async def options_of(self, number: int) -> LaneZero:
        """For the push with that number (or of that epoch). The schedule only goes forward: a lower number
        gets the latest options. With the scheduler's state if parameter servers are to keep it."""
        if (known := newest_at(self._known, number)) is not None:
            self._compute.restore(known)
            self._begun, self._options = known.number, LaneZero(options=known.options)
        self._known, told = (), self._begun
        while self._begun < number:
            before = BeforeStep(epoch_ended=self._begun >= 0, is_own=self._begun + 1 == number)
            state = self._compute.begin_step(before)
            self._begun += 1
            if self._begun == number:
                self._options = LaneZero(options=state.options)
                if told // STATE_EVERY < number // STATE_EVERY:
                    return state.with_fields(number=number, options_change=self._change)
            elif self._begun % STEPS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return self._options

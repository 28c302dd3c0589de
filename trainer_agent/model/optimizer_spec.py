"""Optimizers and schedulers as JSON: what the parameter servers need to step torch's own optimizers.

torch.optim.Adam(groups) ──spec_of──► OptimizerSpec          scheduler.state_dict() ──encode──► JSON ──decode──► same
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from trainer_agent.model.optimizer import rate_scale
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records import JobSpec, Strategy
from trireme_shared.protocol.records.layout import OptimizerSpec
from trireme_shared.protocol.records.step import LaneZero
from trireme_shared.serving.optimizers.classes import (
    ALL_CLASSES,
    CHOICES,
    OF_WHOLE_PARAMETERS,
    no_whole_parameters,
)
from trireme_shared.serving.optimizers.own_step import check_step

T = TypeVar("T")

_WHOLE = ("lamb", "lars", "adafactor", "muon", "shampoo", "soap", "lbfgs")
_SEVERAL_LOSSES = "its step computes the loss several times (by a closure), and a step of a job has one gradient, the mean of all lanes"
_UNKNOWN = "each trainer makes the optimizer from the name of its class and its options, and knows only some classes"
_NO_OPTIONS = ("params", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum", "param_names")


def spec_of(optimizer: Any) -> OptimizerSpec:
    """Class, defaults and options of each group. Raises InvalidArgument for a class that no job can have."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(
            f"optimizer(model) returned {type(optimizer).__name__}, not a torch.optim optimizer",
            hint="return for example torch.optim.SGD(model.parameters(), lr=0.1)",
        )
    name = type(optimizer).__name__
    if type(optimizer) is not ALL_CLASSES.get(name):
        reason = ""
        if any(rule in name.lower() for rule in _WHOLE):
            reason = ": its rule needs whole parameters (their norms or matrices), and a parameter server has blocks that cut them"
        raise InvalidArgument(
            f"optimizer {type(optimizer).__module__}.{name} cannot run on parameter servers{reason}",
            hint=f"use {CHOICES}",
        )
    check_step(optimizer)
    # a loop of one's own has made its scheduler already, which may have changed the learning rates
    rates = [{"lr": group["initial_lr"]} if "initial_lr" in group else {} for group in optimizer.param_groups]
    groups = tuple(_plain_options({**group, **rate}) for group, rate in zip(optimizer.param_groups, rates, strict=True))
    return OptimizerSpec(name=name, defaults=_plain_options(optimizer.defaults), groups=groups)


def for_job(optimizer: T, spec: JobSpec) -> T:
    """The script's, in place with the rates of the job's global batch. Raises InvalidArgument for one that the job cannot have."""
    check_strategy(optimizer, spec.strategy)
    return rate_scale.scaled(optimizer, spec)


def check_strategy(optimizer: Any, strategy: Strategy) -> None:
    """Raises InvalidArgument for a class whose rule needs whole parameters, in a job with parameter servers; in a collective one for a class
    that it cannot have, with the reason (spec_of tells that of parameter servers)."""
    name = type(optimizer).__name__
    is_other = isinstance(optimizer, torch.optim.Optimizer) and type(optimizer) is not ALL_CLASSES.get(name)
    if strategy is Strategy.COLLECTIVE and is_other:
        reason = _SEVERAL_LOSSES if "lbfgs" in name.lower() else _UNKNOWN
        raise InvalidArgument(
            f"optimizer {type(optimizer).__module__}.{name} cannot run in a collective job: {reason}",
            hint=f"use {CHOICES}",
        )
    if strategy is Strategy.PARAMETER_SERVER and type(optimizer) is OF_WHOLE_PARAMETERS.get(name):
        raise InvalidArgument(
            no_whole_parameters(name), hint="use --strategy collective, or AdamW or Lion with a warm-up"
        )


def numeric_options(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], ...]:
    """The options of each group that a scheduler may change: numbers and pairs of numbers."""
    return tuple(
        {name: value for name, value in _plain_options(group).items() if _is_number(value) or isinstance(value, list)}
        for group in optimizer.param_groups
    )


def lane_zero(optimizer: torch.optim.Optimizer, scheduler: Any, options: tuple[dict[str, Any], ...]) -> LaneZero:
    """`options` of a step, with the state after it: of the scheduler, and of the groups' options that it changed."""
    if scheduler is None:
        return LaneZero(options=options)
    groups = [
        {name: encode(value) for name, value in group.items() if name not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    return LaneZero(options=options, scheduler={"state": encode(scheduler.state_dict()), "groups": groups})


def restore(optimizer: torch.optim.Optimizer, scheduler: Any, state: LaneZero) -> None:
    """In place: the scheduler and the groups' options as `lane_zero` recorded them."""
    if scheduler is None or not state.scheduler:
        return
    scheduler.load_state_dict(decode(state.scheduler["state"]))
    for group, options in zip(optimizer.param_groups, state.scheduler["groups"], strict=True):
        group.update({name: decode(value) for name, value in options.items()})


def encode(value: Any) -> Any:
    """`value` in JSON types. Tuples, Counters, dicts with other keys than text and floats that are not finite (JSON has none) are tagged.
    Raises InvalidArgument for others."""
    match value:
        case float() if not math.isfinite(value):
            return {"__float__": str(value)}
        case None | bool() | int() | float() | str():
            return value
        case torch.Tensor():
            return encode(value.item() if value.numel() == 1 else value.tolist())
        case list():
            return [encode(item) for item in value]
        case tuple():
            return {"__tuple__": [encode(item) for item in value]}
        case Counter():
            return {"__counter__": [[encode(key), count] for key, count in value.items()]}
        case dict() | OrderedDict() | defaultdict():
            if all(isinstance(key, str) and not key.startswith("__") for key in value):
                return {key: encode(item) for key, item in value.items()}
            return {"__dict__": [[encode(key), encode(item)] for key, item in value.items()]}
    raise InvalidArgument(
        f"the scheduler's state holds {type(value).__name__} {value!r:.60}, which cannot travel",
        hint="use a torch.optim.lr_scheduler whose state is numbers, text, lists and dicts",
    )


def decode(value: Any) -> Any:
    match value:
        case list():
            return [decode(item) for item in value]
        case {"__float__": text}:
            return float(text)
        case {"__tuple__": items}:
            return tuple(decode(item) for item in items)
        case {"__counter__": pairs}:
            return Counter({decode(key): count for key, count in pairs})
        case {"__dict__": pairs}:
            return {decode(key): decode(item) for key, item in pairs}
        case dict():
            return {key: decode(item) for key, item in value.items()}
    return value


def _plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(name, value) for name, value in options.items() if name not in _NO_OPTIONS}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):  # torch computes with it in the tensor's precision, with other roundings
        raise InvalidArgument(f"optimizer option {name} is a tensor, {value!r:.60}", hint="give it as a number")
    if value is None or isinstance(value, bool) or _is_number(value):
        return value
    if isinstance(value, tuple | list):
        return [_plain(name, item) for item in value]
    raise InvalidArgument(
        f"optimizer option {name} = {value!r:.60} is {type(value).__name__}", hint="options are numbers and booleans"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

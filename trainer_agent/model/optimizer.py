"""The script's optimizer: what the parameter servers need to step torch's own ones, its learning rates, and
what the script does to it while it trains.

    torch.optim.Adam(groups) ──spec_of──► OptimizerSpec
    scheduler.state_dict() ──encode──► JSON ──decode──► same
    optimizer(model) ─► each group's rate times JobSpec.lr_factor (lr_scale, lr_base_batch_size)
        ─► scheduler(optimizer) ─► steps

Parameter servers (collective: each trainer, block by block) step with optimizers of their own, made from the
name of the class, the groups and their options. They do not see what the script changes later, unless a
scheduler does it: schedulers are stepped between two minibatches. So OptimizerWatch notices such changes, and
they are refused.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from operator import is_
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, CyclicLR, OneCycleLR

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
from trireme_shared.serving.optimizers.own_step import added_to_step, check_step
from trireme_shared.serving.optimizers.several import class_names, forget_state, joined, parts_of

_WHOLE = ("lamb", "lars", "adafactor", "muon", "shampoo", "soap", "lbfgs")
_SEVERAL_LOSSES = (
    "its step computes the loss several times (by a closure), and a step of a job has one gradient, "
    "the mean of all lanes"
)
_UNKNOWN = (
    "each trainer makes the optimizer from the name of its class and its options, and knows only some classes"
)
_OF_SCHEDULER = ("max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")
_NO_OPTIONS = ("params", "initial_lr", "param_names", *_OF_SCHEDULER)
OPTIONS = (
    "changed the optimizer's options ({name} of group {number} was {before}, and now it is "
    "{after}), which whoever steps does not see; for "
    "options that change give a scheduler (in a loop of your own: trireme.prepare(..., scheduler=scheduler))"
)
GROUPS = (
    "changed the optimizer's groups of parameters; whoever steps has those with which training began: "
    "make them in optimizer(model)"
)
STEP = "gave the optimizer {added}, which whoever steps does not have: leave it out"
STATE = (
    "changed the optimizer's state, which is where the steps are made: in a job, not in the script's process"
)
NOT_HERE = (
    "optimizer.state: the optimizer's state is where the steps are made, not in the script's "
    "process: the script can neither read nor change it "
    "(checkpoints have it; --init-optimizer starts with one)"
)
BEGUN = "the optimizer has state already ({name} of {parameter}), and training would begin without it"


def spec_of(optimizer: Any) -> OptimizerSpec:
    """Class, defaults and options of each group. Raises InvalidArgument for a class that no job can have."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(
            f"optimizer(model) returned {type(optimizer).__name__}, not a torch.optim optimizer",
            hint="return for example torch.optim.SGD(model.parameters(), lr=0.1); several of them in a list "
            "or a dict",
        )
    for part in parts_of(optimizer):
        _check_class(part)
    # a loop of one's own has made its scheduler already, which may have changed the learning rates
    rates = [{"lr": group["initial_lr"]} if "initial_lr" in group else {} for group in optimizer.param_groups]
    groups = tuple(
        _plain_options({**group, **rate}) for group, rate in zip(optimizer.param_groups, rates, strict=True)
    )
    classes = tuple(class_names(optimizer))
    names = dict.fromkeys(classes)
    return OptimizerSpec(
        name=", ".join(names),
        defaults=_plain_options(optimizer.defaults),
        groups=groups,
        classes=classes if len(names) > 1 else (),
    )


def _check_class(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    if type(optimizer) is not ALL_CLASSES.get(name):
        reason = ""
        if any(rule in name.lower() for rule in _WHOLE):
            reason = (
                ": its rule needs whole parameters (their norms or matrices), and a parameter server "
                "has blocks that cut them"
            )
        raise InvalidArgument(
            f"optimizer {type(optimizer).__module__}.{name} cannot run on parameter servers{reason}",
            hint=f"use {CHOICES}",
        )
    check_step(optimizer)


def for_job(made: Any, spec: JobSpec) -> Any:
    """What the script made as one optimizer, in place with the rates of the job's global batch. Raises
    InvalidArgument for one that the job cannot have."""
    optimizer = joined(made, "optimizer(model) returned")
    for part in parts_of(optimizer):
        check_strategy(part, spec.strategy)
    return scaled(optimizer, spec)


def check_strategy(optimizer: Any, strategy: Strategy) -> None:
    """Raises InvalidArgument for a class whose rule needs whole parameters, in a job with parameter servers;
    in a collective one for a class that it cannot have, with the reason (spec_of tells that of parameter
    servers)."""
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
        {
            name: value
            for name, value in _plain_options(group).items()
            if _is_number(value) or isinstance(value, list)
        }
        for group in optimizer.param_groups
    )


def lane_zero(
    optimizer: torch.optim.Optimizer, scheduler: Any, options: tuple[dict[str, Any], ...]
) -> LaneZero:
    """`options` of a step, with the state after it: of the scheduler, and of the groups' options that it
    changed."""
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


def scheduler_facts(optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    """Class and state of a scheduler that was not stepped yet, with what it has put into the groups of the
    optimizer, in JSON types; {}: there is none."""
    if scheduler is None:
        return {}
    groups = [
        {name: encode(group[name]) for name in _OF_SCHEDULER if name in group}
        for group in optimizer.param_groups
    ]
    state = encode(scheduler.state_dict()) | {"groups": groups}
    named = getattr(scheduler, "named", None)  # of several, see schedule.Schedulers
    name = type(scheduler).__name__ if named is None else ", ".join(type(e).__name__ for e in named.values())
    return {"name": name, "state": state}


def encode(value: Any) -> Any:
    """`value` in JSON types. Tuples, Counters, dicts with other keys than text and floats that are not finite
    (JSON has none) are tagged. Raises InvalidArgument for others."""
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
    # torch computes with it in the tensor's precision, with other roundings
    if isinstance(value, torch.Tensor):
        raise InvalidArgument(
            f"optimizer option {name} is a tensor, {value!r:.60}", hint="give it as a number"
        )
    if value is None or isinstance(value, bool) or _is_number(value):
        return value
    if isinstance(value, tuple | list):
        return [_plain(name, item) for item in value]
    raise InvalidArgument(
        f"optimizer option {name} = {value!r:.60} is {type(value).__name__}",
        hint="options are numbers and booleans",
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class StateElsewhere(defaultdict[Any, Any]):
    """Instead of the state of an optimizer that never steps. It is empty, and refuses to be anything else."""

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise InvalidArgument(NOT_HERE, fatal=True)

    __missing__ = __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = refuse

    def __reduce__(self) -> Any:
        return defaultdict, (dict,)


class OptimizerWatch:
    """`begin`, then `change` says what was changed since. `elsewhere`: the optimizer never steps in this
    process, so it has no state."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, elsewhere: bool) -> None:
        self._parts, self._elsewhere = parts_of(optimizer), elsewhere
        if elsewhere:
            forget_state(optimizer, lambda: StateElsewhere(dict))
        self.begin()

    def begin(self) -> None:
        self._options, self._state = self._options_seen(), self._state_seen()
        self._groups = [list(group["params"]) for group in self._of_parts()]

    def _of_parts(self) -> list[dict[str, Any]]:
        return [group for part in self._parts for group in part.param_groups]

    def change(self) -> str:
        """ "" if nothing was changed."""
        groups = [group["params"] for group in self._of_parts()]
        if len(groups) != len(self._groups) or not all(map(_same, groups, self._groups)):
            return GROUPS
        options = self._options_seen()
        if options != self._options:
            return self._of_options(options)
        for part in self._parts:
            if added := added_to_step(part):
                return STEP.format(added=added)
        return STATE if self._state_seen() != self._state else ""

    def _of_options(self, options: list[dict[str, Any]]) -> str:
        for number, (before, after) in enumerate(zip(self._options, options, strict=True)):
            for name in before.keys() | after.keys():
                if before.get(name) != after.get(name):
                    return OPTIONS.format(
                        name=name, number=number, before=before.get(name), after=after.get(name)
                    )
        return ""

    def _options_seen(self) -> list[dict[str, Any]]:
        return [
            {
                name: value.tolist() if isinstance(value, torch.Tensor) else value
                for name, value in group.items()
                if name != "params"
            }
            for group in self._of_parts()
        ]

    def _state_seen(self) -> Any:
        states = [part.state for part in self._parts]
        if self._elsewhere:
            return list(map(id, states))
        names = [(*values,) for state in states for values in state.values()]
        tensors = [value for state in states for values in state.values() for value in values.values()]
        return (
            [id(parameter) for state in states for parameter in state],
            names,
            list(map(id, tensors)),
            [getattr(each, "_version", None) for each in tensors],
        )


def _same(one: list[Any], other: list[Any]) -> bool:
    """The same objects; tensors that are equal do not count."""
    return len(one) == len(other) and all(map(is_, one, other))


def check_has_not_begun(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> None:
    """`names`: of parameters, by id. Raises InvalidArgument for an optimizer that has made steps, or has the
    state of one that has."""
    for parameter, values in optimizer.state.items():
        steps = values.get("step")
        if steps is not None and not float(steps):  # Adagrad makes its sums at once
            continue
        for name, value in values.items():
            if value is not None:
                told = BEGUN.format(name=name, parameter=names.get(id(parameter), "a parameter"))
                raise InvalidArgument(
                    told,
                    hint="make a new optimizer; to begin with the state in a file, use --init-from FILE "
                    "--init-optimizer",
                )


def scaled(optimizer: Any, spec: JobSpec) -> Any:
    """In place: the rates of the script's optimizer. Raises InvalidArgument: a scheduler was made of them
    already."""
    if spec.lr_scale == "none" or not isinstance(optimizer, Optimizer):
        return optimizer
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise InvalidArgument(
            f"lr_scale is {spec.lr_scale}, and the optimizer has a scheduler already, which goes "
            "on from the rates without it",
            hint="leave lr_scale out and multiply the rate in the script, or train without a scheduler",
        )
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * spec.lr_factor
    return optimizer


def check_scaled(scheduler: Any, spec: JobSpec) -> None:
    """Raises InvalidArgument for one whose rates do not come from the optimizer's."""
    if spec.lr_scale == "none":
        return
    for each in _all_of(scheduler):
        if isinstance(each, OneCycleLR | CyclicLR):
            raise InvalidArgument(
                f"lr_scale is {spec.lr_scale}, and {type(each).__name__} has rates of its own, "
                "which do not follow the optimizer's",
                hint="leave lr_scale out and give it rates for this global batch, or use a scheduler "
                "that multiplies the optimizer's rate",
            )


def rates_sentence(spec: JobSpec) -> str:
    """For people; empty if the rates are the script's."""
    if spec.lr_scale == "none":
        return ""
    return (
        f"learning rates are {spec.lr_factor:.6g} times the script's: {spec.records_per_step} "
        "records a step instead of "
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

"""`init_optimizer`: the state that the optimizer and the scheduler start with.

{"model": ..., "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, a file of torch.save
  ─► checked against the script's optimizer ─► optimizer.state ─► under plain Python that is all
                                                              ─► cut into blocks, sent to parameter servers with their first values
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer_agent.start_values.read import TrainingState, read_training_state
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records import JobSpec
from trireme_shared.serving.optimizers.classes import SCALAR, kinds_of

SHOWN = 5


def load_start_state(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, spec: JobSpec) -> None:
    """Out of the file that `init_from` names, if `init_optimizer` asks for it. Raises InvalidArgument."""
    if spec.init_optimizer and spec.init_from is not None:
        load_training_state(model, optimizer, scheduler, read_training_state(spec.init_from), spec.init_from)


def load_training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, found: TrainingState, where: str
) -> None:
    """Give both the state in `found`; tensors are moved to their parameters' device. The options of the groups (learning rate, ...) stay
    as the script sets them, but are those of the file if there is a scheduler: they follow from its state. Raises InvalidArgument."""
    groups, state = _parts(found.optimizer, where)
    own = optimizer.param_groups
    sizes, mine = [len(group["params"]) for group in groups], [len(group["params"]) for group in own]
    if sizes != mine:
        raise _misfit(where, f"its groups have {sizes} parameters, those of the script's optimizer {mine}")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kinds = kinds_of(optimizer)
    problems: list[str] = []
    taken: dict[int, dict[str, torch.Tensor]] = {}
    order = [(number, p) for number, group in enumerate(own) for p in group["params"]]
    keys = [key for group in groups for key in group["params"]]
    for index, (key, (number, parameter)) in enumerate(zip(keys, order, strict=True)):
        if not parameter.requires_grad:
            continue
        values = {name: value for name, value in state.get(key, {}).items() if value is not None}
        taken[index] = {name: _tensor(name, value, kinds[number]) for name, value in values.items()}
        if problem := _problem(parameter, taken[index], kinds[number]):
            problems.append(f"{names.get(id(parameter), '?')} {problem}")
    if problems:
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise _misfit(where, f"{'; '.join(problems[:SHOWN])}{more}")
    if scheduler is not None:
        if not found.scheduler:
            raise InvalidArgument(
                f"init_optimizer: {where} has no state of a scheduler, and the script has scheduler()",
                hint='save it, too: {"model": ..., "optimizer": ..., "scheduler": scheduler.state_dict()}',
            )
        try:
            scheduler.load_state_dict(found.scheduler)
        except Exception as error:  # a scheduler of another class may raise anything
            raise _misfit(where, f"the scheduler refuses its state: {error}") from error
        for mine_now, theirs in zip(own, groups, strict=True):
            mine_now.update({name: value for name, value in theirs.items() if name not in ("params", "param_names")})
    optimizer.load_state_dict({"state": taken, "param_groups": optimizer.state_dict()["param_groups"]})


def _parts(saved: Any, where: str) -> tuple[list[dict[str, Any]], Mapping[Any, Mapping[str, Any]]]:
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    state = saved.get("state") if isinstance(saved, Mapping) else None
    whole = isinstance(groups, list) and all(isinstance(group, dict) and "params" in group for group in groups)
    if not whole or not isinstance(groups, list) or not isinstance(state, Mapping):
        raise _misfit(where, "it is not what optimizer.state_dict() gives")
    return groups, state


def _misfit(where: str, what: str) -> InvalidArgument:
    return InvalidArgument(
        f"init_optimizer: the optimizer in {where} does not fit the script's: {what}",
        hint="use the optimizer that the file was made with, or leave --init-optimizer out: then its state starts fresh",
    )


def _tensor(name: str, value: Any, kinds: Mapping[str, bool]) -> torch.Tensor:
    """Numbers as torch keeps them now: older versions kept `step` as an int."""
    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
    return tensor.detach().to("cpu", SCALAR) if kinds.get(name) and tensor.dim() == 0 else tensor.detach()


def _problem(parameter: nn.Parameter, values: Mapping[str, torch.Tensor], kinds: Mapping[str, bool]) -> str:
    if values.keys() != kinds.keys():
        return f"has {', '.join(sorted(values)) or 'no state'}, {', '.join(sorted(kinds)) or 'no state'} is needed"
    for name, scalar in kinds.items():
        shape = [] if scalar else list(parameter.shape)
        if list(values[name].shape) != shape:
            return f"has {name} of shape {list(values[name].shape)}, {shape} is needed"
    return ""

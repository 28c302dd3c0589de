"""What an optimizer keeps for each parameter: the names of its state's tensors, and which of them are one number (`step`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from trireme_shared.serving.optimizers.classes import ALL_CLASSES

SCALAR = torch.float32  # of numbers beside the parameter; tensors of its shape have its dtype

Kinds = Mapping[str, bool]


def kinds_of(optimizer: torch.optim.Optimizer) -> list[Kinds]:
    """Of each group: its state after a step, by name: True if it is one float32 number, False if it has the parameter's shape and dtype.
    Empty for classes without state (SGD without momentum)."""
    name = type(optimizer).__name__
    return [
        _kinds(
            name,
            tuple(
                (option, _hashable(value)) for option, value in group.items() if option not in ("params", "param_names")
            ),
        )
        for group in optimizer.param_groups
    ]


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@lru_cache(maxsize=64)
def _kinds(name: str, options: tuple[tuple[str, Any], ...]) -> Kinds:
    """By a step of such an optimizer."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    make: Any = ALL_CLASSES[name]
    optimizer = make([{**dict(options), "params": [parameter]}])
    optimizer.step()
    found: Mapping[str, Any] = optimizer.state.get(parameter, {})
    return {name: value.dim() == 0 for name, value in found.items() if isinstance(value, torch.Tensor)}

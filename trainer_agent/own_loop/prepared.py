"""What a script gives to `trireme.prepare` and `trireme.backward`, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trireme_shared.protocol.metrics import loss_in
from trireme_shared.serving.optimizers.own_step import check_step

FUNCTIONS = "collate", "ids", "evaluate", "metrics"


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the script gave to `trireme.prepare`. `hooks`: collate, ids, scheduler, evaluation_dataset, evaluate and metrics, as far as
    given. `config`: settings of the job."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    dataset: Any
    hooks: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


def check(parts: Prepared) -> None:
    """Raises TypeError, ValueError, InvalidArgument."""
    model: object = parts.model
    optimizer: object = parts.optimizer
    if not isinstance(model, nn.Module):
        msg = f"trireme.prepare got {type(parts.model).__name__} as the model; give a torch.nn.Module"
        raise TypeError(msg)
    if not isinstance(optimizer, torch.optim.Optimizer):
        msg = f"trireme.prepare got {type(parts.optimizer).__name__} as the optimizer; give a torch.optim optimizer"
        raise TypeError(msg)
    check_step(parts.optimizer)  # here the script's own `step` is still there
    for name in FUNCTIONS:
        if name in parts.hooks and not callable(parts.hooks[name]):
            msg = f"trireme.prepare got {type(parts.hooks[name]).__name__} as {name}; give a function"
            raise TypeError(msg)
    if "evaluation_dataset" in parts.hooks and "evaluate" not in parts.hooks:
        msg = "trireme.prepare got evaluation_dataset and no evaluate; give evaluate(model, batch) -> dict of sums"
        raise ValueError(msg)
    if "scheduler" not in parts.hooks and any("initial_lr" in group for group in parts.optimizer.param_groups):
        msg = "the optimizer has a scheduler; give it to Trireme, which steps it: trireme.prepare(..., scheduler=scheduler)"
        raise ValueError(msg)


def is_function(scheduler: Any) -> bool:
    """Whether it makes the scheduler of an optimizer, and is none itself."""
    return callable(scheduler) and not hasattr(scheduler, "step")


def check_loss(loss: Any) -> None:
    """Raises TypeError; InvalidArgument for a dict without a loss."""
    loss = loss_in(loss)
    if not isinstance(loss, torch.Tensor):
        msg = f"trireme.backward got {type(loss).__name__}; give it the minibatch's mean loss, a scalar tensor"
        raise TypeError(msg)
    if loss.numel() != 1:
        msg = f"trireme.backward got a tensor of shape {tuple(loss.shape)}; give it the minibatch's mean loss, a scalar"
        raise TypeError(msg)
    if not loss.requires_grad:
        msg = "trireme.backward got a scalar that does not depend on the parameters"
        raise TypeError(msg)

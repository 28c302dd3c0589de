"""What a script adds to the step of its optimizer or scheduler: a job makes optimizers of the same class and
options, and knows none of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from trireme_shared.protocol.errors import InvalidArgument

_OURS = "torch", "trireme_shared", "trainer_agent", "trireme"
_HINT = (
    "leave it out: limit parameters where forward uses them, keep averages of parameters by "
    "trireme.nn.Ema(module, decay) (docs/buffers.md), and change gradients by hooks of parameters or in a "
    "loop of your own"
)


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raises InvalidArgument for hooks of `step` (the optimizer's, or those of all optimizers), and for a
    `step` that the script has replaced."""
    if problem := added_to_step(optimizer):
        what = f"the optimizer {type(optimizer).__name__} has {problem}"
        raise InvalidArgument(
            f"{what}; a job steps parameters by optimizers that it makes of the same class and "
            "options, without it",
            hint=_HINT,
        )


def added_to_step(optimizer: torch.optim.Optimizer) -> str:
    """What the script added, or ""."""
    for kind, hooks, of_all in (
        ("pre", optimizer._optimizer_step_pre_hooks, _global_optimizer_pre_hooks),  # noqa: SLF001
        ("post", optimizer._optimizer_step_post_hooks, _global_optimizer_post_hooks),  # noqa: SLF001
    ):
        for hook in hooks.values():
            return f"a hook ({_name(hook)}, by register_step_{kind}_hook)"
        for hook in of_all.values():
            return f"a hook of all optimizers ({_name(hook)}, by register_optimizer_step_{kind}_hook)"
    replaced = next((layer for layer in _layers(optimizer.step) if not _is_known(layer)), None)
    return "" if replaced is None else f"a step that was replaced ({_name(replaced)})"


def check_scheduler_step(scheduler: Any) -> None:
    """Raises InvalidArgument if the script has replaced the `step` of this one scheduler. (A class of its own
    may define it.)"""
    own = vars(scheduler).get("step")
    if own is not None and not all(map(_is_known, _layers(own))):
        raise InvalidArgument(
            f"the step of the scheduler {type(scheduler).__name__} was replaced ({_name(own)}), "
            "which no other trainer would know",
            hint="write it as a class: class Mine(torch.optim.lr_scheduler.LRScheduler) with a step of "
            "its own",
        )


def _layers(step: Any) -> Iterator[Any]:
    """A method, and all that it wraps."""
    while step is not None:
        step = getattr(step, "__func__", step)
        yield step
        step = getattr(step, "__wrapped__", None)


def _is_known(layer: Any) -> bool:
    return str(getattr(layer, "__globals__", {}).get("__name__", "")).partition(".")[0] in _OURS


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))

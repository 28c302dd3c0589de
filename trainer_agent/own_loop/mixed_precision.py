"""torch.amp in a loop of one's own: which loss a GradScaler scaled, which steps it leaves out, and autocast
in the script's thread.

    scaler.scale(loss) ──► trireme.backward ──► scaler.step(optimizer) ──► optimizer.step()
                                                           └── a gradient is not finite: the batch is left out

Nobody gives the scaler to `trireme.prepare`, so its class tells the loop of the thread in which it is called.
Autocast belongs to a thread: that of the caller is taken over to the script's thread for the forward pass of
one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

_current: ContextVar[Scaling | None] = ContextVar("grad_scaling", default=None)
DEVICES = "cpu", "cuda"


class Scaling:
    """What GradScalers did in one pass of the loop's body. `stepped(optimizer)` is called when
    `scaler.step(optimizer)` ends, whether it called `optimizer.step()` or not."""

    def __init__(self, stepped: Callable[[torch.optim.Optimizer], None]) -> None:
        self.stepped = stepped
        self.is_used = False
        self.begin()

    def __repr__(self) -> str:
        return f"<Scaling of {len(self._scaled)} losses, rows x {self.row_factor}>"

    def begin(self) -> None:
        """The next pass begins."""
        self._scaled: list[tuple[torch.Tensor, torch.Tensor]] = []
        #: Factor for gradients of embedding tables' rows: the optimizer does not hold them, so the scaler
        # cannot unscale them.
        self.row_factor = 1.0

    def use(self) -> None:
        """GradScalers that are called in this thread tell it."""
        _watch()
        _current.set(self)

    def note(self, scaled: Any, outputs: Any) -> None:
        """`scaler.scale(outputs)` returned `scaled`."""
        self.is_used = True
        self._scaled += zip(_tensors(scaled), _tensors(outputs), strict=False)

    def unscaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss whose scaled value was given to trireme.backward, or `loss` if nothing was scaled. Raises
        TypeError."""
        for scaled, outputs in self._scaled:
            if scaled is loss:
                return outputs
        if self._scaled:
            msg = (
                "trireme.backward got another tensor than scaler.scale returned for this batch, so "
                "the loss to report is not known; "
                "call trireme.backward(scaler.scale(loss)), and add or divide what belongs to the loss before"
            )
            raise TypeError(msg)
        return loss


def unscale_for_kernel(optimizer: torch.optim.Optimizer) -> bool:
    """Unscale the gradients in place for an optimizer with fused=True, which leaves that to its kernel.
    Returns False, and leaves them, if one is not finite."""
    parts = vars(optimizer)
    if (bad := parts.get("found_inf")) is not None and bad.item():
        return False
    if (scale := parts.get("grad_scale")) is not None:
        for gradient in (
            p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ):
            gradient.div_(scale.to(gradient.device))
        parts["grad_scale"] = None
    return True


def _watch() -> None:
    """The class GradScaler tells the Scaling of the thread; without one it does what it does anyway."""
    if hasattr(GradScaler.scale, "__wrapped__"):
        return
    real_scale, real_step = GradScaler.scale, GradScaler.step

    @wraps(real_scale)
    def scale(scaler: GradScaler, outputs: Any) -> Any:
        scaled, scaling = real_scale(scaler, outputs), _current.get()
        if scaling is not None and scaler.is_enabled():
            scaling.note(scaled, outputs)
        return scaled

    @wraps(real_step)
    def step(scaler: GradScaler, optimizer: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
        scaling = _current.get() if scaler.is_enabled() else None
        if scaling is not None:
            scaling.row_factor = 1.0 / scaler.get_scale()
        found = real_step(scaler, optimizer, *arguments, **named)
        if scaling is not None:
            scaling.stepped(optimizer)
        return found

    for name, method in (("scale", scale), ("step", step)):
        setattr(GradScaler, name, method)


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, Iterable):
        for each in outputs:
            yield from _tensors(each)


def autocast_here() -> list[torch.autocast]:
    """As it is in this thread, to be entered in another one."""
    return [
        torch.autocast(device, dtype=torch.get_autocast_dtype(device))
        for device in DEVICES
        if torch.is_autocast_enabled(device)
    ]

"""What a loop of one's own does to gradients and buffers, and what the user is told of that.

trireme.backward ─► gradients are the script's, as in plain PyTorch ─► optimizer.step()
    ─► changes of buffers are undone ─► the next batch
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

SCALES = (
    "each trainer has a GradScaler of its own, and its scale is kept by nobody else: where float16 "
    "gradients under- or overflow, the result depends on "
    "which trainer computed them; a batch whose step the scaler leaves out is left out of the "
    "job's step, with its buffers"
)
CHANGES = (
    "the loop changes gradients before optimizer.step(): a step takes the mean over {lanes} "
    "minibatches, and the gradient of each is changed before "
    "that; to clip the gradient of a whole step, use the setting clip_grad_norm"
)
BUFFERS = (
    "the loop changes the buffer {name} behind optimizer.step(), and that is undone, since the "
    "next batch may be one of another lane: change buffers "
    "before optimizer.step()"
)
ROWS = (
    "the loop changes gradients before optimizer.step(); those of rows of embedding tables stay as they are"
)


def marks(parameters: Iterable[torch.Tensor]) -> list[tuple[int, int, float]]:
    """Which tensors the gradients are, how often each was written in place, and their sums, which also tell
    what was written through `.data`."""
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [(id(gradient), gradient._version, float(gradient.sum())) for gradient in found]  # noqa: SLF001


def check_none_is_left(parameters: Iterable[torch.Tensor]) -> None:
    """Raises RuntimeError: backward would add to the gradients of an earlier batch, and another process may
    have computed that."""
    left = [parameter.grad.any() for parameter in parameters if parameter.grad is not None]
    if left and bool(torch.stack(left).any()):
        raise RuntimeError(
            "the parameters still have gradients of an earlier batch; call optimizer.zero_grad() "
            "before trireme.backward"
        )


def forget_those_of_others(model: nn.Module, held: Iterable[torch.Tensor]) -> None:
    """Parameters that the optimizer does not hold lose their gradients: `optimizer.zero_grad()` leaves them,
    so they would be sums over the batches that this process happened to compute."""
    of_optimizer = {id(parameter) for parameter in held}
    for parameter in model.parameters():
        if id(parameter) not in of_optimizer:
            parameter.grad = None


def notices(*, scales: bool, changes: bool, buffer: str, lanes: int, tables: bool) -> list[str]:
    """What the loop does that means something else in a job than in one process. `buffer`: the name of one
    that it changed behind optimizer.step()."""
    told = (
        (SCALES, scales),
        (CHANGES.format(lanes=lanes), changes and lanes > 1),
        (ROWS, changes and tables),
        (BUFFERS.format(name=buffer), bool(buffer)),
    )
    return [sentence for sentence, holds in told if holds]


class Noted(NamedTuple):
    """A buffer as it was: how often it had been written in place, and a copy of its values."""

    name: str
    buffer: torch.Tensor
    writes: int
    values: torch.Tensor


def noted(model: nn.Module) -> list[Noted]:
    """All buffers."""
    return [Noted(name, buffer, _writes(buffer), buffer.clone()) for name, buffer in model.named_buffers()]


def put_back(model: nn.Module, before: list[Noted]) -> str:
    """In place. Returns the name of a buffer that was changed since `before`, or ""."""
    now = dict(model.named_buffers())
    changed = (n.name for n in before if now.get(n.name) is not n.buffer or _writes(n.buffer) != n.writes)
    name = next(changed, "")
    with torch.no_grad():
        for (full_name, buffer), was in zip(now.items(), before, strict=False):
            if buffer.is_inference():  # made in torch.inference_mode: it cannot be written
                path, _, own = full_name.rpartition(".")
                setattr(model.get_submodule(path), own, was.values)
            else:
                buffer.copy_(was.values)
    return name


def _writes(buffer: torch.Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version  # noqa: SLF001  torch has no public name for it

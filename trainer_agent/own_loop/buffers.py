"""The model's buffers between optimizer.step() and the next batch of a loop of one's own: what the script does to them there is undone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn


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

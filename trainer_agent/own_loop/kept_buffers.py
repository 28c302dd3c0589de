"""Buffers that a script changes outside of a pass of its loop, behind optimizer.step(): nobody shares such changes."""

from __future__ import annotations

import torch
from torch import nn

from shared.blocks.buffer_mean import bits_of, is_statistic

UNDONE = (
    "the loop changes the buffer {name} between optimizer.step() and the next batch; that is undone, since the next batch may be that of another "
    "lane. Call model.eval() for what shall leave statistics alone"
)
REFUSED = (
    "the loop changed the buffer {name} between optimizer.step() and the next batch, which may be that of another lane, so the change would be "
    "lost; change it in forward, or between trireme.backward and optimizer.step()"
)


class KeptBuffers:
    """As they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (f"{path}.{name}".lstrip("."), module, name, buffer, buffer.clone())
            for path, module in model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]

    def restore(self) -> tuple[str, str]:
        """In place. What was done to statistics, which is undone, and to other buffers, which is refused; "" if nothing."""
        undone = refused = ""
        with torch.no_grad():
            for full_name, module, name, buffer, value in self._kept:
                now = getattr(module, name, None)
                if now is buffer and bool((bits_of(now) == bits_of(value)).all()):
                    continue
                if not isinstance(now, torch.Tensor) or now.shape != value.shape or not is_statistic(module, name):
                    refused = refused or REFUSED.format(name=full_name)
                    continue
                undone = undone or UNDONE.format(name=full_name)
                now.copy_(value)
        return undone, refused

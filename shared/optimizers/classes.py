"""The optimizers that parameter servers step: element-wise update rules, so stepping blocks gives the bits of stepping whole parameters."""

from __future__ import annotations

import torch

from shared.optimizers.lion import Lion

OF_TORCH = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam")
CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    **{name: getattr(torch.optim, name) for name in OF_TORCH},
    "Lion": Lion,
}
CHOICES = f"one of torch.optim: {', '.join(OF_TORCH)}; or trireme.optim.Lion"

"""The optimizers by name. CLASSES: element-wise update rules, so blocks can be stepped with the bits of whole parameters (see parameter_parts.py).

OF_WHOLE_PARAMETERS need norms of whole parameters: members of collective jobs step them, parameter servers cannot.
"""

from __future__ import annotations

import torch

from trireme_shared.serving.optimizers.layerwise import LAMB, LARS
from trireme_shared.serving.optimizers.lion import Lion

OF_TORCH = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam")
CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    **{name: getattr(torch.optim, name) for name in OF_TORCH},
    "Lion": Lion,
}
OF_WHOLE_PARAMETERS: dict[str, type[torch.optim.Optimizer]] = {"LARS": LARS, "LAMB": LAMB}
ALL_CLASSES = CLASSES | OF_WHOLE_PARAMETERS
CHOICES = f"one of torch.optim: {', '.join(OF_TORCH)}; or trireme.optim.Lion; with strategy collective also trireme.optim.LARS and LAMB"


def no_whole_parameters(name: str) -> str:
    """Why a job with parameter servers cannot have this class of OF_WHOLE_PARAMETERS."""
    return f"optimizer {name} needs the norm of each whole parameter, and parameter servers have blocks that cut them"

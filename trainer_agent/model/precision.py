"""`precision = "bf16"`: forward, loss and evaluation run under torch.autocast; parameters, gradients and optimizer stay float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from shared.errors import InvalidArgument
from shared.records.job_spec import Precision


def check_precision(precision: Precision, model: nn.Module, device: torch.device) -> None:
    """Raises InvalidArgument: the model or the device can do nothing with it."""
    if precision == "fp32":
        return
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if torch.float32 not in dtypes:
        found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise InvalidArgument(
            f"precision is bf16, which computes with float32 parameters in bfloat16, and those of the model are {found}",
            hint="leave precision out, or build the model in float32",
        )
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise InvalidArgument(
            f"precision is bf16, and {torch.cuda.get_device_name(device)} has no bfloat16",
            hint="use precision fp32, or a GPU from Ampere (compute capability 8.0) on",
        )


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Around one forward pass with its loss. Weights are cast once in it; what it leaves is backward's, in the same dtypes."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()

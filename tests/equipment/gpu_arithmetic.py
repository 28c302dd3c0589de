"""Arithmetic as a GPU rounds it, on the CPU: what CUDA's kernels do otherwise, for code whose bits must not
depend on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROUNDED_ONCE = {"add", "add_", "sub", "sub_", "mul", "mul_"}
EXACT = {"copy_", "_to_copy", "clone", "zero_", "zeros", "empty", "aminmax", "_local_scalar_dense"}
VIEWS = {"as_strided", "slice", "view", "detach", "alias"}


class GpuArithmetic(TorchDispatchMode):
    """While it is entered, this thread divides by a number as CUDA does: it multiplies by the rounded
    reciprocal. Operations that are neither exact nor rounded once raise AssertionError: nobody knows that
    they give the same bits on every device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = func.overloadpacket.__name__, kwargs or {}
        if name in {"div", "div_"} and not isinstance(args[1], torch.Tensor):
            multiply = torch.Tensor.mul_ if name == "div_" else torch.Tensor.mul
            return multiply(args[0], float(np.float32(1) / np.float32(args[1])))
        assert name in ROUNDED_ONCE | EXACT | VIEWS, f"{func} may depend on the device"
        assert options.get("alpha", 1) == 1, f"{func} with alpha may be a fused multiply-add"
        return func(*args, **options)

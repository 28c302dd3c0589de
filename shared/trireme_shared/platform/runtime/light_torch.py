"""torch.optim without torch's compiler, which the first optimizer of a process would load: 1.7 s and 100 MB.

Methods of Optimizer that must not be compiled import torch._dynamo at their first call, to exclude themselves. torch keeps the
result in an attribute of the function. With the function itself in that attribute, torch does not import torch._dynamo. A
process that does compile something loads it then.
"""

from __future__ import annotations

from torch.optim import Optimizer

_METHODS = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
_ATTRIBUTE = "__dynamo_disable"  # where torch._compile._disable_dynamo keeps it


def optimizers_without_compiler() -> None:
    """Call it before the first optimizer is made."""
    for name in _METHODS:
        method = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if method is not None and not hasattr(method, _ATTRIBUTE):
            setattr(method, _ATTRIBUTE, method)

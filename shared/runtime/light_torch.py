"""torch.optim without torch's compiler, which the first optimizer of a process would load: 1.7 s and 100 MB.

Methods of Optimizer that must not be compiled say so to torch._dynamo when they are first called, and import it for that.
What they would be told is kept at the function; with the function itself kept there, they do not ask. A process that does
compile something loads torch._dynamo then.
"""

from __future__ import annotations

from torch.optim import Optimizer

_ASKING = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
_ANSWER = "__dynamo_disable"  # where torch._compile._disable_dynamo keeps it


def optimizers_without_compiler() -> None:
    """Call it before the first optimizer is made."""
    for name in _ASKING:
        method = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if method is not None and not hasattr(method, _ANSWER):
            setattr(method, _ANSWER, method)

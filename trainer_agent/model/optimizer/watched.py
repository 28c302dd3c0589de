"""What a script does to its optimizer while it trains: noticed, so that it can be refused.

Parameter servers (collective: each trainer, block by block) step with optimizers of their own, made from the name of the class, the groups and
their options. They do not see what the script changes later, unless a scheduler does it: schedulers are stepped between two minibatches.
"""

from __future__ import annotations

from collections import defaultdict
from operator import is_
from typing import Any, NoReturn

import torch

from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.serving.optimizers.own_step import added_to_step

OPTIONS = (
    "changed the optimizer's options ({name} of group {number} was {before}, and now it is {after}), which whoever steps does not see; for "
    "options that change give a scheduler (in a loop of your own: trireme.prepare(..., scheduler=scheduler))"
)
GROUPS = "changed the optimizer's groups of parameters; whoever steps has those with which training began: make them in optimizer(model)"
STEP = "gave the optimizer {added}, which whoever steps does not have: leave it out"
STATE = "changed the optimizer's state, which is where the steps are made: in a job, not in the script's process"
NOT_HERE = (
    "optimizer.state: the optimizer's state is where the steps are made, not in the script's process: the script can neither read nor change it "
    "(checkpoints have it; --init-optimizer starts with one)"
)
BEGUN = "the optimizer has state already ({name} of {parameter}), and training would begin without it"


class StateElsewhere(defaultdict[Any, Any]):
    """Instead of the state of an optimizer that never steps. It is empty, and refuses to be anything else."""

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise InvalidArgument(NOT_HERE, fatal=True)

    __missing__ = __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = refuse

    def __reduce__(self) -> Any:
        return defaultdict, (dict,)


class OptimizerWatch:
    """`begin`, then `change` says what was changed since. `elsewhere`: the optimizer never steps in this process, so it has no state."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, elsewhere: bool) -> None:
        self._optimizer, self._elsewhere = optimizer, elsewhere
        if elsewhere:
            optimizer.state = StateElsewhere(dict)
        self.begin()

    def begin(self) -> None:
        self._options, self._state = self._options_seen(), self._state_seen()
        self._groups = [list(group["params"]) for group in self._optimizer.param_groups]

    def change(self) -> str:
        """ "" if nothing was changed."""
        groups = [group["params"] for group in self._optimizer.param_groups]
        if len(groups) != len(self._groups) or not all(map(_same, groups, self._groups)):
            return GROUPS
        options = self._options_seen()
        if options != self._options:
            return self._of_options(options)
        if added := added_to_step(self._optimizer):
            return STEP.format(added=added)
        return STATE if self._state_seen() != self._state else ""

    def _of_options(self, options: list[dict[str, Any]]) -> str:
        for number, (before, after) in enumerate(zip(self._options, options, strict=True)):
            for name in before.keys() | after.keys():
                if before.get(name) != after.get(name):
                    return OPTIONS.format(name=name, number=number, before=before.get(name), after=after.get(name))
        return ""

    def _options_seen(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups
        return [
            {
                name: value.tolist() if isinstance(value, torch.Tensor) else value
                for name, value in group.items()
                if name != "params"
            }
            for group in groups
        ]

    def _state_seen(self) -> Any:
        state = self._optimizer.state
        if self._elsewhere:
            return id(state)
        names = [(*values,) for values in state.values()]
        tensors = [value for values in state.values() for value in values.values()]
        return (
            list(map(id, state)),
            names,
            list(map(id, tensors)),
            [getattr(each, "_version", None) for each in tensors],
        )


def _same(one: list[Any], other: list[Any]) -> bool:
    """The same objects; tensors that are equal do not count."""
    return len(one) == len(other) and all(map(is_, one, other))


def check_has_not_begun(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> None:
    """`names`: of parameters, by id. Raises InvalidArgument for an optimizer that has made steps, or has the state of one that has."""
    for parameter, values in optimizer.state.items():
        steps = values.get("step")
        if steps is not None and not float(steps):  # Adagrad makes its sums at once
            continue
        for name, value in values.items():
            if value is not None:
                told = BEGUN.format(name=name, parameter=names.get(id(parameter), "a parameter"))
                raise InvalidArgument(
                    told,
                    hint="make a new optimizer; to begin with the state in a file, use --init-from FILE --init-optimizer",
                )

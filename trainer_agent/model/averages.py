"""Averages of parameters that a job carries along: `trireme.nn.Ema(module, decay)`.

    version s: parameters, averages of the steps before ──load──► the model ──follow──► averages up to s
        ──► forward of every lane, evaluations, exports

The averages are buffers. Those of a version lack its own parameters: whoever loads it lets them follow, which
is a function of the version alone. So all lanes go on from the same bits, and no trainer has anything that
could be lost with it.

torch's own averages are parameters that a script updates itself: `updates_by_torch` notices that.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.swa_utils import AveragedModel

from trainer_agent.tables.embedding import TableLayer
from trireme_shared.protocol.errors import InvalidArgument

APART = (
    "an Ema begins with another value of {name} than its {module} has; averages follow once before the first "
    "step, too, so these are one follow() ahead of those of a loop in plain PyTorch. Make the Ema behind "
    "whatever sets its module's parameters; averages of a model that goes on (--init-from) may stay so"
)
_made: WeakSet[Ema] = WeakSet()  # by a script, wherever it keeps them
_by_torch: WeakSet[AveragedModel] = WeakSet()


class Ema(nn.Module):
    """A copy of `module` that has, instead of its parameters, their exponential moving averages: after each
    step `average.lerp_(parameter, 1 - decay)`, beginning with the values that they have now. Its other
    buffers are those of `module`. It is called as `module` is.

    It has no parameters: no optimizer steps it, and no gradient comes to it. In a job, and in
    `trireme.train`, it follows by itself, as a part of the model; a loop in plain PyTorch calls `follow()`
    after `optimizer.step()`. Raises InvalidArgument for a decay outside of [0, 1), and for a module without
    parameters, with layers that do not read their weights by name (nn.LSTM, nn.GRU, nn.RNN), or with
    embedding tables.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        super().__init__()
        given: object = decay
        if not isinstance(given, int | float) or not 0 <= given < 1:
            raise InvalidArgument(
                f"Ema got decay = {given!r:.80}", hint="give a number from 0 to below 1, such as 0.999"
            )
        if next(module.parameters(), None) is None:
            raise InvalidArgument(f"Ema got {type(module).__name__}, which has no parameters to average")
        self.decay = float(decay)
        self.module = _as_buffers(module)
        self._followed = (module,)  # no part of this module: it is one of the model already
        _made.add(self)

    def extra_repr(self) -> str:
        return f"decay={self.decay}"

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.module(*arguments, **named)

    @property
    def followed(self) -> nn.Module:
        """The module whose parameters it averages."""
        return self._followed[0]

    @torch.no_grad()
    def follow(self) -> None:
        """Take the parameters into the averages, in place, once after each step. Raises InvalidArgument if
        the module has lost a parameter or buffer since."""
        parameters, buffers = dict(self.followed.named_parameters()), dict(self.followed.named_buffers())
        averages: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for name, average in self.module.named_buffers():
            if name in parameters:
                averages.append(average)
                values.append(parameters[name])
            elif name in buffers:
                average.copy_(buffers[name])
            else:
                raise InvalidArgument(
                    f"an Ema has an average of {name}, which its {type(self.followed).__name__} has not any "
                    "more",
                    hint="make the Ema when the module has all its layers, and parametrizations on them",
                )
        torch._foreach_lerp_(averages, values, 1 - self.decay)


def averages_of(model: nn.Module, *, has_lanes: bool = True) -> Sequence[Ema]:
    """The averages in `model`. `has_lanes`: the job is synchronous. Raises InvalidArgument for some that
    would not follow."""
    parts = set(model.modules())
    found = [part for part in model.modules() if isinstance(part, Ema)]
    if any(each.followed in parts and each not in parts for each in _made):
        raise InvalidArgument(
            "an Ema follows the model and is no part of it, so trainers do not share it",
            hint="make it an attribute of the model: self.ema = trireme.nn.Ema(self.body, 0.999)",
        )
    if found and not has_lanes:
        raise InvalidArgument(
            "the model has an Ema, and the job is asynchronous: its trainers replace each other's buffers, "
            "so steps would be missing in the average",
            hint="set mode = sync",
        )
    return found


def begin_apart(averages: Sequence[Ema]) -> str:
    """A sentence for the user, if some do not begin with the parameters that training begins with; else
    ""."""
    for each in averages:
        parameters = dict(each.followed.named_parameters())
        for name, average in each.module.named_buffers():
            if name in parameters and not torch.equal(average, parameters[name]):
                return APART.format(name=name, module=type(each.followed).__name__)
    return ""


def updates_by_torch() -> int:
    """How many updates the `AveragedModel`s of this process have made, wherever a script keeps them. Less
    than before: some of them are gone."""
    return sum(int(each.n_averaged) for each in _by_torch)


def _note_averages(parent: nn.Module, name: str, _: nn.Module | None) -> None:
    """Called by torch when a module becomes part of another one: no list leads to the averages that a script
    keeps beside its model."""
    if name == "module" and isinstance(parent, AveragedModel):
        _by_torch.add(parent)


register_module_module_registration_hook(_note_averages)


def _as_buffers(module: nn.Module) -> nn.Module:
    """A copy that has buffers in place of its parameters."""
    made = copy.deepcopy(module)
    buffers: dict[int, torch.Tensor] = {}  # by the parameter's id: several modules may have it
    for part in made.modules():
        if isinstance(part, nn.RNNBase | TableLayer):
            what = "embedding tables" if isinstance(part, TableLayer) else "weights that it keeps in a list"
            raise InvalidArgument(
                f"Ema got a module with {type(part).__name__}, which has {what}",
                hint="average the other parts of the model, each by an Ema of its own",
            )
        for name, parameter in list(part.named_parameters(recurse=False)):
            buffer = buffers.setdefault(id(parameter), parameter.detach().clone())
            delattr(part, name)
            part.register_buffer(name, buffer)
    return made

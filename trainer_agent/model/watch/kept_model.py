"""The model as it was laid out: which parameters, buffers and modules it has, and which parameters are trained.

A job lays parameters out once, before training. What the script changes of the model afterwards would be trained by nobody, or by one trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from operator import ne

from torch import nn

THAWED = (
    "changed requires_grad of the parameter {name}: it was {before} when training began, and now it is {now}; a job trains the same parameters "
    "from its first step to its last: set requires_grad in model() (or before trireme.prepare), and train what thaws or freezes later in a second "
    "job that begins with this one's model (--init-from)"
)
CHANGED = "changed the model: {what} since training began; a job lays its parameters out once: change the model in model() (or before trireme.prepare)"


class KeptModel:
    """Compared with the model as it is now."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        named = dict(model.named_parameters())
        self._names, self._tensors = list(named), list(named.values())
        self._trained = _trained(self._tensors)
        self._parameters = _parameters(model)
        self._buffers = dict.fromkeys(name for name, _ in model.named_buffers())
        self._modules: dict[str, int] | None = None  # after the first minibatch, which may make modules that it needs

    def change(self, *, fully: bool) -> str:
        """What was changed, or "". `fully`: names and modules too, which takes longer."""
        trained = _trained(self._tensors)
        if trained != self._trained:
            name = next(compress(self._names, map(ne, trained, self._trained)))
            before = self._trained[self._names.index(name)]
            return THAWED.format(name=name, before=before, now=not before)
        return self._structure() if fully else ""

    def _structure(self) -> str:
        modules = {name: id(module) for name, module in self._model.named_modules()}
        if self._modules is None:
            self._modules = modules
        for kind, before, now in (
            ("parameter", self._parameters, _parameters(self._model)),
            ("buffer", self._buffers, dict.fromkeys(name for name, _ in self._model.named_buffers())),
            ("module", self._modules, modules),
        ):
            if now != before:
                return CHANGED.format(what=_difference(kind, before, now))
        return ""


def _trained(parameters: list[nn.Parameter]) -> list[bool]:
    return [parameter.requires_grad for parameter in parameters]


def _parameters(model: nn.Module) -> dict[str, object]:
    """A parameter is another one also if its shape is."""
    return {name: (id(parameter), parameter.shape) for name, parameter in model.named_parameters()}


def _difference(kind: str, before: Mapping[str, object], now: Mapping[str, object]) -> str:
    for name in before:
        if name not in now:
            return f"the {kind} {name} was taken away"
        if before[name] != now[name]:
            return f"the {kind} {name} was replaced"
    return f"the {kind} {next(name for name in now if name not in before)} was added"

"""Several optimizers of one model, each with parameters of its own, as one torch.optim.Optimizer.

    optimizer(model) ─► {"generator": Adam, "discriminator": SGD} ─joined─► Several
        its groups   | of Adam | of Adam | of SGD |      the optimizers' own dicts, which schedulers change
        its state    of each parameter, in the optimizer that holds it

A block has parameters of one group, so it has one class of optimizer and its options.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any

import torch

from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.metrics import LOSS, is_free_name

NAMES = (
    "the name of an optimizer is also that of its loss, and of the metric that shows it: letters, digits and "
    ". _ -, a letter first, no name that the job itself uses"
)

IN_TURNS = (
    "; a step computes the losses of all optimizers first: to step one before the loss of another is "
    "computed, give the losses in turns, one in this step and the other in the next (docs/habits.md)"
)
BOTH = (
    'the script gave "loss" and {name}, the loss of an optimizer: "loss" alone trains the parameters of all '
    "optimizers, and losses by the optimizers' names add up to it"
)
NO_LOSS = (
    "the script gave no loss, and its optimizers are {names}: give one loss for all of them, or the loss of "
    "at least one of them by its name"
)


class Several(torch.optim.Optimizer):
    """`given`: the list or dict of the script. `names`: of `parts`, in their order; those of a list are "0",
    "1", ... A state may be read and written here, but it is the parts': assign it to them."""

    parts: tuple[torch.optim.Optimizer, ...] = ()

    def __init__(self, given: object, named: Mapping[str, torch.optim.Optimizer]) -> None:
        groups = [group for part in named.values() for group in part.param_groups]
        super().__init__([{"params": [p for group in groups for p in group["params"]]}], {})
        self.given, self.names, self.parts = given, tuple(named), tuple(named.values())
        self.state: Any = _States(self.parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the parts, as they are now: what loads a state replaces them."""
        return [group for part in self.parts for group in part.param_groups]

    @param_groups.setter
    def param_groups(self, _: Any) -> None:
        """torch's constructor makes an empty list."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Of all parts, in their order."""
        for part in self.parts:
            part.step(closure)

    def state_dict(self) -> Any:
        """In the form of `given`: a list, or a dict by name, of what each part's gives."""
        return self.formed([part.state_dict() for part in self.parts])

    def formed(self, values: Sequence[Any]) -> Any:
        """`values`, one of each part, in the form of `given`."""
        return dict(zip(self.names, values, strict=True)) if isinstance(self.given, Mapping) else list(values)


class _States(MutableMapping[Any, Any]):
    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = parts
        self._of = {p: part for part in parts for group in part.param_groups for p in group["params"]}

    def __getitem__(self, parameter: Any) -> Any:
        return self._of[parameter].state[parameter]

    def __setitem__(self, parameter: Any, state: Any) -> None:
        self._of[parameter].state[parameter] = state

    def __delitem__(self, parameter: Any) -> None:
        del self._of[parameter].state[parameter]

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._of and parameter in self._of[parameter].state

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(part.state for part in self._parts)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)

    def get(self, parameter: Any, default: Any = None) -> Any:
        """Makes none, as a defaultdict would."""
        part = self._of.get(parameter)
        return default if part is None else part.state.get(parameter, default)


def joined(found: Any, got: str) -> Any:
    """One optimizer for a list, tuple or dict of them; anything else as it is. `got`: how messages begin,
    "optimizer(model) returned". Raises InvalidArgument."""
    named = named_in(found)
    if named is None or not all(isinstance(part, torch.optim.Optimizer) for part in named.values()):
        return found
    if isinstance(found, Mapping):
        for name in found:
            if not is_free_name(name):
                raise InvalidArgument(f"{got} an optimizer with the name {name!r:.80}: {NAMES}")
    holders: dict[Any, str] = {}
    for name, part in named.items():
        for index, parameter in enumerate(p for group in part.param_groups for p in group["params"]):
            if (other := holders.setdefault(parameter, name)) != name:
                raise InvalidArgument(
                    f"{got} optimizers {other} and {name}, which both hold a parameter (number {index} of "
                    f"{name}, of shape {list(parameter.shape)})",
                    hint="give each parameter to one of them; a parameter that two losses train belongs to "
                    "one optimizer, with the sum of both losses",
                )
    return Several(found, named)


def losses_of(optimizer: Several, found: Any) -> dict[str, Any] | None:
    """Of what a script gives as its loss: the loss of each optimizer by name, None for one that is not
    stepped. None: it is one loss for all of them. Raises InvalidArgument."""
    names = ", ".join(optimizer.names)
    if isinstance(found, Mapping) and isinstance(optimizer.given, Mapping):
        own = [name for name in optimizer.names if name in found]
        if LOSS in found and own:
            raise InvalidArgument(BOTH.format(name=own[0]))
        if LOSS in found:
            return None
        losses = {name: found.get(name) for name in optimizer.names}
    elif isinstance(found, list | tuple) and not isinstance(optimizer.given, Mapping):
        if len(found) != len(optimizer.names):
            raise InvalidArgument(
                f"the script gave {len(found)} losses, and it has {len(optimizer.names)} optimizers: give "
                "one of each, in their order, None for one that is not stepped; or one loss for all of them"
            )
        losses = dict(zip(optimizer.names, found, strict=True))
    else:
        return None
    if all(loss is None for loss in losses.values()):
        raise InvalidArgument(NO_LOSS.format(names=names))
    return losses


def named_in(found: Any) -> dict[str, Any] | None:
    """What a list, tuple or dict that is not empty holds, by name; None: it is none."""
    if isinstance(found, Mapping) and found:
        return {str(name): each for name, each in found.items()}
    if isinstance(found, list | tuple) and found:
        return {str(number): each for number, each in enumerate(found)}
    return None


def parts_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    return optimizer.parts if isinstance(optimizer, Several) else (optimizer,)


def given(optimizer: torch.optim.Optimizer) -> Any:
    """What the script made."""
    return optimizer.given if isinstance(optimizer, Several) else optimizer


def class_names(optimizer: torch.optim.Optimizer) -> list[str]:
    """Of each group."""
    return [type(part).__name__ for part in parts_of(optimizer) for _ in part.param_groups]


def forget_state(
    optimizer: torch.optim.Optimizer, make: Callable[[], Any] = lambda: defaultdict(dict)
) -> None:
    """In place: each part's state is a new one of `make`."""
    for part in parts_of(optimizer):
        part.state = make()

"""Floating-point buffers of which a step takes the mean over lanes, although they hold no statistics: noticed, so that the user hears of it.

    this lane's value after forward ─┐
    another lane's, or that of the  ─┴─► differ ─► one warning with the buffer's name
    next version: the lanes' mean

The mean of running means and variances over lanes is what a larger minibatch would have given, or nearly. The mean of two queues, codebooks or hidden
states is something else: rows of norm 1 become shorter. Values alone do not tell which of the two a buffer is: a
running mean near 0 changes as much, relative to its size, as the row of a queue. So buffers of torch's normalisation layers, and those that
are called like theirs, count as statistics, and all others that differ between lanes are told. With one lane nothing differs.
"""

from __future__ import annotations

import torch
from torch import nn

from trainer_agent.model.flat import Plan, Vector
from trainer_agent.model.watch.unshared_state import FIRST_LOOKS, LOOK_EVERY
from trireme_shared.blocks.buffer_mean import bits_of, is_statistic

WARNING = (
    "the buffer {name} differs between lanes, and a step takes its mean over the lanes, weighted by their records. That is right for running "
    "means. If it holds rows or values that must stay as they are (a queue, a codebook, a hidden state), set lanes=1, keep such values in an "
    "int64 buffer (the first lane's count), or compute them from parameters"
)


class AveragedBuffers:
    """`lane` after each forward pass, `version` when the parameters in use are those of the next step. `warnings` are taken by `told`."""

    def __init__(self, model: nn.Module, plan: Plan, lanes: int) -> None:
        self._places = [
            place
            for place in plan.buffers
            if lanes > 1 and model.get_buffer(place.name).is_floating_point() and not _is_statistic(model, place.name)
        ]
        self._kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # before and after forward, of one lane
        self._minibatches = 0
        self._warnings: list[str] = []

    def lane(self, after: Vector, before: Vector) -> None:
        """The buffers of a lane are in `after`; they were loaded from `before`. Looks at some minibatches only."""
        looks = self._minibatches < FIRST_LOOKS or self._minibatches % LOOK_EVERY == 0
        self._minibatches += 1
        if not looks:
            return
        for place in self._places:
            value, loaded = after.view(place), before.view(place)
            if place.name in self._kept:
                self._compare(place.name, value)
            elif not _same(value, loaded):
                self._kept[place.name] = loaded.clone(), value.clone()

    def version(self, current: Vector) -> None:
        """The next step begins with the buffers in `current`: the mean over the lanes of this step, or what it was before, if the step was left out."""
        for place in [place for place in self._places if place.name in self._kept]:
            value = current.view(place)
            if not _same(value, self._kept[place.name][0]):
                self._compare(place.name, value)
        self.forget()

    def forget(self) -> None:
        """What comes next belongs to another history."""
        self._kept.clear()

    def told(self) -> tuple[str, ...]:
        """The warnings since the last call."""
        told, self._warnings = tuple(self._warnings), []
        return told

    def _compare(self, name: str, value: torch.Tensor) -> None:
        if not _same(value, self._kept[name][1]):
            self._warnings.append(WARNING.format(name=name))
            self._places = [place for place in self._places if place.name != name]


def _is_statistic(model: nn.Module, name: str) -> bool:
    path, _, own = name.rpartition(".")
    return is_statistic(model.get_submodule(path), own)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((bits_of(one) == bits_of(other)).all())

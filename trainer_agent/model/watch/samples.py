"""Three numbers of each trained parameter: by them a change through `.data`, which neither torch's counters nor addresses show, is noticed in any
minibatch, if it concerns the parameter as a whole. To compare all numbers takes as long as to read the model; UnsharedState does so now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain, compress
from operator import call, ne
from typing import Any

import numpy as np
import torch

from trainer_agent.model.flat import Plan, Vector
from trireme_shared.blocks.buffer_mean import bits_of

Sampled = tuple[torch.Tensor, ...] | list[int]


class Samples:
    """Reads the bits of those numbers as integers, from a vector with the parameters in use or from the parameters `named`, wherever they lie."""

    def __init__(self, plan: Plan, named: Mapping[str, torch.Tensor]) -> None:
        indices: dict[int, list[int]] = {}
        self._names: list[str] = []
        places = sorted((p for p in plan.parameters if p.elements), key=lambda place: place.segment)
        for place in places:
            numbers = [place.first + number for number in _three(place.elements)]
            indices.setdefault(place.segment, []).extend(numbers)
            self._names += [place.name] * len(numbers)
        self._gathered = {segment: torch.tensor(numbers) for segment, numbers in indices.items()}
        self._parameters = [named[place.name] for place in places]
        self._addresses: list[int] = []
        self._readers: list[Callable[[], int]] = []

    def of_vector(self, vector: Vector) -> tuple[torch.Tensor, ...]:
        """In host memory. Of each segment."""
        return tuple(
            bits_of(vector.segments[segment]).index_select(0, numbers) for segment, numbers in self._gathered.items()
        )

    def of_parameters(self, addresses: list[int]) -> list[int]:
        """`addresses`: of all parameters, now. [] if some are not in host memory: a GPU would be waited for."""
        if self._addresses != addresses:  # seldom: an optimizer steps in place
            self._addresses = addresses
            on_host = all(parameter.is_cpu for parameter in self._parameters)
            self._readers = [reader for each in self._parameters for reader in _readers(each)] if on_host else []
        return list(map(call, self._readers))

    def changed(self, before: Sampled, after: Sampled) -> str:
        """The name of the first parameter that differs, or "". Both: of vectors, or of the parameters."""
        if isinstance(before, tuple) and isinstance(after, tuple):
            same = all(map(torch.equal, before, after))
        else:
            same = before == after
        if same:
            return ""
        return next(compress(self._names, map(ne, _numbers(before), _numbers(after))))


def _numbers(sampled: Sampled) -> Iterable[int]:
    return chain.from_iterable(each.tolist() for each in sampled) if isinstance(sampled, tuple) else sampled


def _readers(parameter: torch.Tensor) -> list[Callable[[], int]]:
    """Each reads one of its three numbers where it lies: a tenth of the time that torch takes."""
    bits = bits_of(parameter.detach()).numpy()
    places: list[Any] = [(*np.unravel_index(number, bits.shape), ...) for number in _three(bits.size)]
    return [bits[place].item for place in places]


def _three(elements: int) -> tuple[int, ...]:
    return tuple(sorted({0, elements // 2, elements - 1}))

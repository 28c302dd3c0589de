"""Three numbers of each trained parameter: by them a change through `.data`, which neither torch's counters nor addresses show, is noticed in any
minibatch, if it concerns the parameter as a whole. To compare all numbers takes as long as to read the model; UnsharedState does so now and then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shared.blocks.buffer_mean import bits_of
from trainer_agent.model.flat import Plan, Vector


class Samples:
    """Of a vector with the parameters in use, or of the parameters wherever they lie."""

    def __init__(self, plan: Plan) -> None:
        self._indices: dict[int, list[int]] = {}
        self._names: list[str] = []
        self._places = sorted((p for p in plan.parameters if p.elements), key=lambda place: place.segment)
        for place in self._places:
            numbers = [place.first + number for number in _three(place.elements)]
            self._indices.setdefault(place.segment, []).extend(numbers)
            self._names += [place.name] * len(numbers)
        self._gathered = {segment: torch.tensor(numbers) for segment, numbers in self._indices.items()}

    def of_vector(self, vector: Vector) -> list[torch.Tensor]:
        """In host memory."""
        return [bits_of(vector.segments[segment])[numbers] for segment, numbers in self._gathered.items()]

    def of_parameters(self, named: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Wherever they lie; this takes longer."""
        values = (named[place.name].detach().reshape(-1) for place in self._places)
        return [bits_of(flat[list(_three(len(flat)))]) for flat in values]

    def changed(self, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> str:
        """The name of the first parameter that differs, or "". Both: of one vector."""
        passed = 0
        for one, other in zip(before, after, strict=True):
            if not torch.equal(one, other):
                return self._names[passed + int((one != other).nonzero()[0])]
            passed += len(one)
        return ""


def _three(elements: int) -> tuple[int, ...]:
    return tuple(sorted({0, elements // 2, elements - 1}))

"""Blocks some of whose parameters have no gradient in some steps, because they require none. They are left as
they are, with their part of the optimizer's state, as torch.optim leaves a parameter whose `grad` is None.

    block    | body.weight | body.bias | head.weight ...
    all have made the same steps     one optimizer for the block, one `step`
    body is frozen in a step         an optimizer for each parameter, with its part of the state, from then on

What is frozen in a step is part of the version that the step makes, and comes with the options of the
optimizer, as FROZEN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from trireme_shared.blocks.buffers import bytes_of
from trireme_shared.protocol.records.layout import Block
from trireme_shared.protocol.records.step import ParameterNumbers
from trireme_shared.serving.core.geometry import ParameterParts, Parts
from trireme_shared.serving.core.optimizers import BlockOptimizer, Options, State, whole_block_optimizer
from trireme_shared.serving.optimizers.classes import SCALAR, kinds_of

FROZEN = "frozen"  # among the options of a block: the places of its frozen parameters
#: In the state of a block whose parameters have made different steps: `begun.<place>` is 1 for each that
# has a state, and its numbers are `<name>.<place>`.
BEGUN = "begun"


class Freezing:
    """Adds to a block's options what is frozen in the step."""

    def __init__(self, parts: ParameterParts) -> None:
        self._parts = parts
        self._numbers: ParameterNumbers = ()
        self._of_block: dict[int, tuple[int, ...]] = {}

    def options(self, block: Block, options: Options, numbers: ParameterNumbers) -> Options:
        """`options` of the block's group, in a step that leaves the parameters with these numbers as they
        are. Raises InvalidArgument: the layout does not say where parameters lie."""
        if not numbers:
            return options
        if numbers != self._numbers:
            self._numbers, self._of_block = numbers, {}
        if block.number not in self._of_block:
            self._of_block[block.number] = self._parts.frozen_in(block, numbers)
        places = self._of_block[block.number]
        return {**options, FROZEN: places} if places else options


def block_optimizer(name: str, chosen: Options, values: torch.Tensor, parts: Parts) -> BlockOptimizer:
    """`parts`: see ParameterParts.of; without them, no parameter of the block is ever frozen."""
    make = partial(whole_block_optimizer, name, chosen)
    return Apart(values, parts, make) if parts else make(values, parts)


class Apart(BlockOptimizer):
    """Steps a block as one, and parameter by parameter once they have made different steps. `parts`: (first
    element, how many) of each parameter in the block. `make(values, parts)`: an optimizer of these values."""

    def __init__(
        self, values: torch.Tensor, parts: Parts, make: Callable[[torch.Tensor, Parts], BlockOptimizer]
    ) -> None:
        self._elements, self._make = values.numel(), make
        self._places = [slice(first, first + count) for first, count in parts]
        self._whole = make(values, parts)
        self.torch_optimizer = self._whole.torch_optimizer
        self._dtype = values.dtype
        self._each: list[BlockOptimizer] = []  # of each parameter, once they have made different steps
        self._vectors: State = {}  # the state of all of them; each has views of it
        self._lacking: set[int] = set()  # the places of those that have no state yet
        self._given: State = {}  # by `add_state`

    def only_reads(self, options: Options) -> bool:
        if not self._is_apart(options):
            return self._whole.only_reads(options)
        return all(each.only_reads(options) for _, each in self._stepped(options))

    def step_into(
        self, out: torch.Tensor, values: torch.Tensor, gradient: torch.Tensor, options: Options
    ) -> None:
        if not self._is_apart(options):
            self._whole.step_into(out, values, gradient, options)
            return
        out.copy_(values)
        for place, each in self._stepped(options):
            each.step_into(out[place], values[place], gradient[place], options)
        self._gather()

    def step(self, values: torch.Tensor, gradient: torch.Tensor, options: Options) -> None:
        if not self._is_apart(options):
            self._whole.step(values, gradient, options)
            return
        for place, each in self._stepped(options):
            each.step(values[place], gradient[place], options)
        self._gather()

    def forget_values(self) -> None:
        for each in (self._whole, *self._each):
            each.forget_values()

    def state(self) -> State:
        """As long as all of its parameters have made the same steps, that of a block stepped as one."""
        if not self._each:
            return self._whole.state()
        if len(self._lacking) == len(self._each):
            return {}
        return {**self._vectors, **block_numbers([each.state() for each in self._each])}

    def load(self, state: State) -> None:
        if not any("." in name for name in state) and not self._each:
            self._whole.load(state)
        elif state:
            self._part(state)

    def add_state(self, name: str, payload: memoryview) -> bool:
        own, _, place = name.rpartition(".")
        (kinds,) = kinds_of(self.torch_optimizer)
        scalar = kinds.get(own or name, own == BEGUN)
        fits = scalar and place.isdecimal() and int(place) < len(self._places) if own else name in kinds
        like = torch.zeros(() if scalar else self._elements, dtype=SCALAR if scalar else self._dtype)
        if not fits or payload.nbytes != like.nbytes:
            return False
        bytes_of(like.reshape(-1))[:] = payload.cast("B")
        self._given[name] = like
        self.load(dict(self._given))
        return True

    def _is_apart(self, options: Options) -> bool:
        """Whether parameters are stepped one by one, in a step with these options and from then on."""
        frozen = options.get(FROZEN, ())
        if frozen and not self._each and len(frozen) < len(self._places):
            self._part(self._whole.state())
        return bool(self._each or frozen)

    def _stepped(self, options: Options) -> list[tuple[slice, BlockOptimizer]]:
        """None, if all of them are frozen from the first step on."""
        frozen, places = options.get(FROZEN, ()), self._places[: len(self._each)]
        both = zip(places, self._each, strict=True)
        return [part for place, part in enumerate(both) if place not in frozen]

    def _part(self, state: State) -> None:
        """One optimizer for each parameter, with its part of `state`."""
        self._vectors = {name: value for name, value in state.items() if value.dim()}
        self._each, self._lacking = [], set()
        nothing = torch.empty(self._elements, dtype=self._dtype)
        for place, part in enumerate(self._places):
            each = self._make(nothing[part], ((0, part.stop - part.start),))
            each.forget_values()
            self._each.append(each)
            if (numbers := numbers_of(state, place)) is None:
                self._lacking.add(place)
                continue
            own = {name: vector[part] for name, vector in self._vectors.items()}
            each.load({**own, **{name: value.clone() for name, value in numbers.items()}})

    def _gather(self) -> None:
        """torch has made the state of some parameters, in their first step: it moves into the vectors."""
        for place in sorted(self._lacking):
            each, part = self._each[place], self._places[place]
            if not (state := each.state()):
                continue
            self._lacking.remove(place)
            for name, value in state.items():
                if value.dim():
                    if name not in self._vectors:
                        self._vectors[name] = torch.zeros(self._elements, dtype=value.dtype)
                    self._vectors[name][part] = value
                    state[name] = self._vectors[name][part]
            each.load(state)


def block_numbers(states: Sequence[State]) -> State:
    """The numbers (such as `step`) in a block's state; `states`: of each of its parameters, empty if it has
    none. As long as they are equal, the block has one of each."""
    numbers = [{name: value for name, value in state.items() if not value.dim()} for state in states]
    if all(states) and all(_equal(numbers[0], other) for other in numbers):
        return numbers[0] if numbers else {}
    found: State = {}
    for place, own in enumerate(numbers):
        if states[place]:
            found[f"{BEGUN}.{place}"] = torch.ones((), dtype=SCALAR)
            found |= {f"{name}.{place}": value for name, value in own.items()}
    return found


def numbers_of(state: Mapping[str, torch.Tensor], place: int) -> State | None:
    """The numbers of the parameter at that place, out of a block's state; None: it has no state."""
    if not any("." in name for name in state):
        return {name: value for name, value in state.items() if not value.dim()} if state else None
    if f"{BEGUN}.{place}" not in state:
        return None
    return {
        name.removesuffix(f".{place}"): value
        for name, value in state.items()
        if name.endswith(f".{place}") and not name.startswith(f"{BEGUN}.")
    }


def shapes_of(state: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """By name, whether the block has one number of a kind or one of each parameter."""
    shapes = {name.partition(".")[0]: tuple(value.shape) for name, value in state.items()}
    return {name: shape for name, shape in shapes.items() if name != BEGUN}


def _equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())

"""What a metric object of an evaluation has seen: its states, which are merged without the object.

minibatch ─► MetricState ─ merged ─► the task's, in its report ─ merged ─► the evaluation's, in EvaluationSums
    ─► an object that computes the metric (trainer_agent.model.metric_objects)

Sums are exact and tensors are kept by task, so the order in which tasks end changes no bit.
"""

from __future__ import annotations

import math
from enum import StrEnum
from operator import add
from typing import Annotated, Self, TypeAlias

from pydantic import ConfigDict, Field, model_validator

from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.record import Int64, Record

MOST_STATES = 64  # of a metric
MOST_DIMENSIONS = 8
QUOTED = 3  # bytes around a text in JSON: quotes and a comma

Parts = tuple[float, ...]


class Reduction(StrEnum):
    """How two values of a state's element become one."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


class Elements(Record):
    """A state whose size does not depend on how many records it has seen."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="constants")

    reduction: Reduction = Field(description="How elements of two minibatches become one.")
    dtype: Annotated[str, Field(pattern=r"^(u?int8|int(16|32|64)|b?float16|float(32|64))$")] = Field(
        description="Name of the torch dtype in which the metric is computed."
    )
    shape: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=MOST_DIMENSIONS)] = Field(
        description="Size in each dimension; empty: one number."
    )
    numbers: tuple[Int64 | float, ...] = Field(description="The elements, the last dimension fastest.")
    parts: dict[int, Parts] = Field(
        default_factory=dict,
        description="By place in `numbers`: numbers with the exact sum, where one float cannot hold it.",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.numbers) != math.prod(self.shape):
            msg = f"shape {self.shape} has {math.prod(self.shape)} elements, not {len(self.numbers)}"
            raise ValueError(msg)
        if self.parts and not 0 <= min(self.parts) <= max(self.parts) < len(self.numbers):
            msg = f"parts of the elements {min(self.parts)} to {max(self.parts)} of {len(self.numbers)}"
            raise ValueError(msg)
        return self

    def is_like(self, other: Elements) -> bool:
        """Whether both can be merged."""
        return (self.reduction, self.dtype, self.shape) == (other.reduction, other.dtype, other.shape)

    def plus(self, other: Elements) -> Self:
        """With the elements of other records; `is_like` holds. Raises InvalidArgument."""
        if self.reduction is not Reduction.SUM:
            pick = max if self.reduction is Reduction.MAX else min
            chosen = (
                math.nan if math.isnan(one) or math.isnan(two) else pick(one, two)
                for one, two in zip(self.numbers, other.numbers, strict=True)
            )
            return self.with_fields(numbers=tuple(chosen))
        if all(isinstance(number, int) for number in (*self.numbers, *other.numbers)):
            sums = tuple(map(add, self.numbers, other.numbers))
            if sums and not -(2**63) <= min(sums) <= max(sums) < 2**63:
                raise InvalidArgument(f"a sum of {self.dtype} is beyond the range of 64 bits")
            return self.with_fields(numbers=sums)
        numbers, parts = list(self.numbers), dict(self.parts)
        for place, value in enumerate(other.numbers):
            if value == 0:
                continue
            exact = parts.pop(place, ()) or (float(numbers[place]),)
            for part in other.parts.get(place) or (float(value),):
                exact = exact_parts(exact, part)
            numbers[place] = total_of(exact)
            if len(exact) > 1:
                parts[place] = exact
        return self.with_fields(numbers=tuple(numbers), parts=parts)


class MetricState(Record):
    """The states of one metric object, by name."""

    elements: Annotated[dict[str, Elements], Field(max_length=MOST_STATES)] = Field(
        default_factory=dict, description="States that do not grow with the records."
    )
    tensors: Annotated[dict[str, dict[int, tuple[str, ...]]], Field(max_length=MOST_STATES)] = Field(
        default_factory=dict,
        description="States that grow with the records, by number of the task (0 in the report of a task): "
        "one text a tensor, in the order of minibatches.",
    )

    def plus(self, other: MetricState) -> Self:
        """With the states of other records. Raises InvalidArgument."""
        if self.elements.keys() != other.elements.keys() or self.tensors.keys() != other.tensors.keys():
            names = [", ".join((*each.elements, *each.tensors)) for each in (self, other)]
            msg = f"it has the states {names[0]} after one minibatch, {names[1]} after another one"
            raise InvalidArgument(msg, hint="make the objects in evaluation_metrics() the same each time")
        elements = {}
        for name, one in self.elements.items():
            if not one.is_like(two := other.elements[name]):
                msg = (
                    f"its state {name} is {one.dtype} of shape {one.shape} after one minibatch, and "
                    f"{two.dtype} of shape {two.shape} after another one"
                )
                raise InvalidArgument(msg, hint="tell the metric its size when it is made, as num_classes")
            elements[name] = one.plus(two)
        tensors = {}
        for name, held in self.tensors.items():
            more = other.tensors[name]
            tensors[name] = held | {task: (*held.get(task, ()), *more[task]) for task in more}
        return self.with_fields(elements=elements, tensors=tensors)

    @property
    def growing_bytes(self) -> int:
        """Of the values that are kept for each record, as JSON."""
        return sum(
            len(text) + QUOTED for held in self.tensors.values() for texts in held.values() for text in texts
        )

    def of_task(self, number: int) -> Self:
        """What the report of task `number` brings, as it is kept."""
        kept = {
            name: {number: tuple(text for texts in held.values() for text in texts)}
            for name, held in self.tensors.items()
        }
        return self.with_fields(tensors=kept)


#: What an evaluation adds up over minibatches and tasks.
Sum: TypeAlias = float | MetricState


def merged(name: str, before: Sum | None, value: Sum) -> Sum:
    """The sum `name` of two minibatches of a task, or the states of two tasks. Raises InvalidArgument."""
    if before is None:
        return value
    if isinstance(before, MetricState) and isinstance(value, MetricState):
        try:
            return before.plus(value)
        except InvalidArgument as error:
            raise InvalidArgument(f"the metric {name}: {error.message}", hint=error.hint) from None
    if isinstance(before, MetricState) or isinstance(value, MetricState):
        msg = f"{name} is a number in one minibatch of the evaluation, and a metric object in another one"
        raise InvalidArgument(msg, hint="give the number another name")
    return before + value


def exact_parts(parts: Parts, value: float) -> Parts:
    """Numbers that do not overlap, with the exact sum of `parts` and `value`: as math.fsum does it (Shewchuk,
    "Adaptive Precision Floating-Point Arithmetic"). A sum that is not finite is one number."""
    if not math.isfinite(value) or not all(map(math.isfinite, parts)):
        return (sum(parts, value),)
    found: list[float] = []
    for each in parts:
        large, small = (value, each) if abs(value) >= abs(each) else (each, value)
        value = large + small
        if rest := small - (value - large):
            found.append(rest)
    return (*found, value) if math.isfinite(value) else (value,)


def total_of(parts: Parts) -> float:
    """Their sum, rounded once."""
    return math.fsum(parts) if all(map(math.isfinite, parts)) else sum(parts)

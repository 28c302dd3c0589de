"""The norm of a whole gradient out of the sums of squares of its blocks: the same bits whoever adds them, in
whatever order; and what the norm does to the step, by the job's settings (Clipping).

    squares_of(block) ... --exactly rounded sum, square root--> norm
        --> clip_factor: what the gradient is multiplied by

Squares are added in groups of GROUP numbers, then in float64: a third of the time that float64 takes for all
of it, and the result is exact to about ten digits. Each operation is done by one thread alone, or on each
group for itself, so the number of threads changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records import JobSpec, Mode
from trireme_shared.protocol.records.job_choices import Nonfinite

GROUP, ROW = 64, 16384
EPSILON = 1e-6  # as nn.utils.clip_grad_norm_


def squares_of(values: torch.Tensor) -> float:
    """The sum of the squares of a block of gradients (1-d, on a CPU, float32, bfloat16 or float16)."""
    if values.dtype is not torch.float32:
        values = values.float()
    whole = len(values) // GROUP * GROUP
    norms = torch.linalg.vector_norm(values[:whole].view(-1, GROUP), dim=1).double()
    rest: float = torch.linalg.vector_norm(values[whole:]).item()
    found = _total(norms.square_()) + rest * rest
    if not math.isfinite(found):  # squares that are too large for float32, or values that are not finite
        found = in_float64(values)
    return found


def in_float64(values: torch.Tensor) -> float:
    """As `squares_of`, of 1-d numbers of any dtype, all of it in float64."""
    return _total(values.double().square())


def _total(numbers: torch.Tensor) -> float:
    """Their sum. torch adds more than 32768 numbers in parts, one for each thread."""
    rows = len(numbers) // ROW * ROW
    total: float = numbers[rows:].sum().item()
    if rows:
        total += numbers[:rows].view(-1, ROW).sum(1).sum().item()
    return total


def norm_of(squares: Iterable[float]) -> float:
    """The square root of their sum. It is NaN or infinite if one of them is."""
    found = list(squares)
    if not all(map(math.isfinite, found)):
        return math.nan if any(map(math.isnan, found)) else math.inf
    return math.sqrt(math.fsum(found))


def clip_factor(norm: float, limit: float) -> float:
    """A number of float32, at most 1. As in nn.utils.clip_grad_norm_, a NaN norm gives NaN, an infinite one
    0."""
    if math.isnan(norm):
        return norm
    return torch.tensor(min(1.0, limit / (norm + EPSILON)), dtype=torch.float32).item()


@dataclass(frozen=True, slots=True)
class Clipping:
    """What the norm of a step's whole gradient does to the step. `limit`: clip_grad_norm; blocks hold their
    gradients until the norm is known (None: they do not). `every`: without a limit, the norm is measured in
    every so many steps (0: never)."""

    limit: float | None
    on_nonfinite: Nonfinite = "fail"
    every: int = 0

    @classmethod
    def of(cls, spec: JobSpec) -> Clipping | None:
        """None: nothing is held or measured. In asynchronous jobs the trainer clips what it pushes."""
        if spec.mode is not Mode.SYNC:
            return None
        return cls(spec.clip_grad_norm, spec.on_nonfinite, spec.grad_norm_every)

    @property
    def holds(self) -> bool:
        return self.limit is not None

    def measures(self, step: int) -> bool:
        """Whether squares of the step's gradient are added up without holding it."""
        return self.limit is None and self.every > 0 and step % self.every == 0

    def check(self, step: int, norm: float) -> None:
        """Raises InvalidArgument: such a norm is not taken."""
        if norm < 0 or (self.on_nonfinite == "fail" and not math.isfinite(norm)):
            msg = (
                f"the norm of the gradient of step {step} is {norm}: expected a finite number that is "
                "not negative"
            )
            raise InvalidArgument(msg)

    def factor(self, norm: float) -> float | None:
        """What the gradient is multiplied by; None: the step is left out, since the norm is not finite."""
        if self.on_nonfinite == "skip" and not math.isfinite(norm):
            return None
        assert self.limit is not None
        return clip_factor(norm, self.limit)

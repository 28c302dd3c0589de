"""The norm of a whole gradient out of the sums of squares of its blocks: the same bits whoever adds them, in whatever order.

    squares_of(block) ... --exactly rounded sum, square root--> norm --> clip_factor: what the gradient is multiplied by

Squares are added in groups of GROUP numbers, then in float64: a third of the time that float64 takes for all of it, and the result
is exact to about ten digits. Each operation is done by one thread alone, or on each group for itself, so the number of threads
changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

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
    """A number of float32, at most 1. As in nn.utils.clip_grad_norm_, a NaN norm gives NaN, an infinite one 0."""
    if math.isnan(norm):
        return norm
    return torch.tensor(min(1.0, limit / (norm + EPSILON)), dtype=torch.float32).item()

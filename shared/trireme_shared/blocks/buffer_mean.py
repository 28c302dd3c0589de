"""How two nodes of lanes become one, by the kind of their segment; the mean of a buffer over lanes. What no
lane changed stays as it is, in every bit: masks of -inf, tables, the padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from trireme_shared.protocol.lanes import combine

Mean = Callable[..., tuple[Any, int]]
"""Of two nodes, (left values, their samples, right values, their samples): as
trireme_shared.protocol.lanes.combine."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def is_statistic(module: nn.Module, name: str) -> bool:
    """Whether this buffer of a module follows the data as those of torch's normalisation layers do, or is
    called like theirs."""
    return name in STATISTICS or isinstance(module, _NormBase)


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: NaN equals itself, and 0.0 is not -0.0."""
    return values.view(_BITS[values.element_size()])


def combine_buffers(
    left: torch.Tensor, left_count: int, right: torch.Tensor, right_count: int
) -> tuple[torch.Tensor, int]:
    """As trireme_shared.protocol.lanes.combine, but elements with the same bits on both sides keep them: the
    mean of equal values may round, and it overflows for the largest ones."""
    if not (left_count and right_count and left.is_floating_point()):
        return combine(left, left_count, right, right_count)
    same, kept = bits_of(left) == bits_of(right), left.clone()
    mean, total = combine(left, left_count, right, right_count)
    mean.copy_(torch.where(same, kept, mean))
    return mean, total


def first_lane(
    left: torch.Tensor, left_count: int, right: torch.Tensor, right_count: int
) -> tuple[torch.Tensor, int]:
    """As `combine_buffers`, for buffers that follow the first lane that has data: nothing is written."""
    return (left if left_count else right), left_count + right_count


def mean_of(kind: str) -> Mean:
    """How nodes of a segment of this kind (see Segment) are combined."""
    means: dict[str, Mean] = {"param": combine, "buffer": combine_buffers, "first": first_lane}
    return means[kind]


def add_changes(
    left: torch.Tensor, left_count: int, right: torch.Tensor, right_count: int
) -> tuple[torch.Tensor, int]:
    """As `combine_buffers`, for the changes of integer buffers in asynchronous mode: they add up."""
    if left_count and right_count and not left.is_floating_point():
        return left.add_(right), left_count + right_count
    return combine_buffers(left, left_count, right, right_count)

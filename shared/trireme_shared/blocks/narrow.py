"""float32 values in a narrower dtype: rounded to nearest, ties to even; what does not fit float16 is refused.

bfloat16 keeps 8 bits of a value and the whole range of float32. float16 keeps 11 bits from 6e-5 to 65504, fewer below, and
none below 3e-8. Nothing is scaled here: scale the loss if gradients are outside that range.
"""

from __future__ import annotations

import math

import torch

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int64": torch.int64}
_FLOAT16_END = 65520.0  # the first value that is not rounded down to the largest, 65504


def cast_into(narrow: torch.Tensor, values: torch.Tensor) -> None:
    """`narrow` = `values`, of the same shape. Infinite and NaN stay so. Raises OverflowError for values beyond float16."""
    if narrow.dtype == torch.float16:
        low, high = torch.stack(torch.aminmax(values)).tolist()  # a GPU is waited for once
        largest = max(-low, high)
        if _FLOAT16_END <= largest < math.inf:
            msg = f"{largest:g} does not fit float16, which ends at 65504"
            raise OverflowError(msg)
    narrow.copy_(values)


def round_to(values: torch.Tensor, scratch: torch.Tensor) -> None:
    """Round `values` **in place** to the dtype of `scratch`, which has the same shape and arbitrary content.

    If gradients are sent in a narrower dtype, every node of the canonical tree is rounded, lanes and root included. Then what
    is sent is exact, and the bits do not depend on which trainer computed which lanes. Raises as `cast_into`.
    """
    cast_into(scratch, values)
    values.copy_(scratch)

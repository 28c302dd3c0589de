"""Learning rates that follow the global batch."""

from __future__ import annotations

import math

from trireme_shared.protocol.records.job_spec.choices import RateScale


def check_rates(scale: RateScale, base: int | None) -> None:
    """`base`: JobSettings.lr_base_batch_size. Raises ValueError for one without the other."""
    if scale != "none" and base is None:
        msg = f"lr_scale is {scale}, and lr_base_batch_size is not set; give the records of a step for which the script's learning rate was chosen"
        raise ValueError(msg)
    if scale == "none" and base is not None:
        msg = f"lr_base_batch_size is {base}, and lr_scale is none, so no rate follows it; set lr_scale to linear or sqrt, or leave it out"
        raise ValueError(msg)


def lr_factor(scale: RateScale, base: int | None, records: int) -> float:
    """What rates are multiplied by that were chosen for steps of `base` records."""
    ratio = records / (base or records)
    return math.sqrt(ratio) if scale == "sqrt" else ratio

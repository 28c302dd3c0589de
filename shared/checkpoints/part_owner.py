"""What writing and committing checkpoints need of the process that owns blocks."""

from __future__ import annotations

from typing import Protocol


class PartOwner(Protocol):
    """`index` names its part. `timeline`: of its parameters. `term`: the highest it has seen. `checkpoint_error`: why its
    checkpoints cannot be written now, for people; "" if they can."""

    index: int
    incarnation: str
    timeline: int
    term: int
    checkpoint_error: str

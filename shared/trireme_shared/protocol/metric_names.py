"""The names of a job's metrics: those that the job itself uses, and which others scripts may choose."""

from __future__ import annotations

MOST_NAMES = 32
NAME = r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$"
LOSS, EVALUATION = "loss", "evaluation."
LEARNING_RATE, GRADIENT_NORM, NONFINITE, SPEED, TIME = "lr", "grad_norm", "nonfinite", "records_per_second", "time."
_OWN = frozenset({LOSS, LEARNING_RATE, GRADIENT_NORM, NONFINITE, SPEED})
_OWN_PREFIXES = (EVALUATION, TIME, f"{LEARNING_RATE}.")


def is_own(name: str) -> bool:
    """Whether the job itself uses the name."""
    return name in _OWN or name.startswith(_OWN_PREFIXES)


def rate_names(groups: int) -> list[str]:
    """Of the learning rates of so many parameter groups."""
    return [LEARNING_RATE] if groups == 1 else [f"{LEARNING_RATE}.{group}" for group in range(groups)]

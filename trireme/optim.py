"""Optimizers beside those of torch.optim that parameter servers step. They are torch optimizers: any other script can use them, too."""

from __future__ import annotations

from shared.optimizers.lion import Lion

__all__ = ["Lion"]

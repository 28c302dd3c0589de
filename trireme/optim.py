"""Optimizers beside those of torch.optim. They are torch optimizers: any other script can use them, too.
Parameter servers step Lion; LARS and LAMB are for strategy collective and for plain PyTorch."""

from __future__ import annotations

from trireme_shared.serving.optimizers.classes import LAMB, LARS, Lion

__all__ = ["LAMB", "LARS", "Lion"]

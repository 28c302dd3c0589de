"""Two optimizers as one, for scripts in plain PyTorch: one of the tables and one of the rest."""

from __future__ import annotations

from torch.optim import Optimizer


class TwoOptimizers:
    def __init__(self, of_tables: Optimizer, of_rest: Optimizer) -> None:
        self._all = of_tables, of_rest

    def zero_grad(self) -> None:
        for one in self._all:
            one.zero_grad()

    def step(self) -> None:
        for one in self._all:
            one.step()

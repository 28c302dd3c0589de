"""A minibatch that was collated before its forward pass, as if it had been collated in it: the random numbers go on where `collate` left them.

prepare: generators kept ─► seeded ─► collate ─► ReadyBatch ─► generators as they were          backward: ReadyBatch.begin ─► loss(model, batch)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from shared.logged_metrics import Logged, collected


@dataclass(frozen=True, slots=True)
class Generators:
    """The states of all generators that a collate or a forward pass may use."""

    host: torch.Tensor
    device: torch.Tensor | None
    python: tuple[Any, ...]
    numpy: dict[str, Any]

    @classmethod
    def now(cls, device: torch.device) -> Generators:
        own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), own, random.getstate(), np.random.get_state(legacy=False))  # noqa: NPY002  user code uses the global generator

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    """`generators`: after `collate`; `logged`: in it."""

    batch: Any
    generators: Generators
    logged: Mapping[str, Logged]

    @classmethod
    def made(cls, collate: Callable[[], Any], device: torch.device) -> ReadyBatch:
        """By `collate()`, with generators that are seeded."""
        with collected() as logged:
            batch = collate()
        return cls(batch, Generators.now(device), logged)

    def begin(self, logged: dict[str, Logged], device: torch.device) -> Any:
        """The batch, for a forward pass whose metrics go to `logged`."""
        logged.update(self.logged)
        self.generators.restore(device)
        return self.batch


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def seed_everything(seed: int) -> None:
    """All generators that a forward pass or a collate may use. `seed`: of 63 bits."""
    if _has_accelerator():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)  # as torch.manual_seed, which asks for devices each time: 0.5 ms
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002  user code uses the global generator


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """After the block all generators are as they were."""
    before = Generators.now(device)
    try:
        yield
    finally:
        before.restore(device)

"""The random generators that a script's code shares with all other code of its process: torch's, NumPy's and
Python's own.

A script must get the same numbers in every process of its job, and must not change the numbers of others. So
its code runs

    with seeded(seed): script's code        no other thread of the process draws meanwhile; afterwards the
                                            generators are as they were

This module does not import torch: the master, which counts records, does without it unless the script imports
it.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from threading import RLock
from typing import Any, TypeVar

from trireme_shared.protocol.lanes import step_seed

T = TypeVar("T")

#: The seed of torch's generator when a process starts. A script is imported with it, in jobs as by `python
# script.py`.
START_SEED = 67280421310721

#: First records of a dataset in a process, which show whether its records draw.
PROBED = 32

#: Held while code draws whose numbers matter: a forward pass in the compute thread, a record in a reader's
# thread.
ALONE = RLock()


def seed_of(seed: int, *names: str | int) -> int:
    """The seed of what is named, in [0, 2**63): a function of the job's seed and the names alone."""
    for name in names:
        seed = step_seed(seed, zlib.crc32(name.encode()) if isinstance(name, str) else name, 0)
    return seed


@dataclass(frozen=True, slots=True)
class Generators:
    """The states of all of them. `host`, `devices`: of torch; None and () while nobody has imported it, or
    uses CUDA."""

    host: Any
    devices: tuple[Any, ...]
    python: tuple[Any, ...]
    numpy: dict[str, Any]

    @classmethod
    def now(cls) -> Generators:
        torch = _torch()
        host = torch.get_rng_state() if torch is not None else None
        devices = (
            tuple(torch.cuda.get_rng_state_all()) if torch is not None and torch.cuda.is_initialized() else ()
        )
        return cls(host, devices, random.getstate(), _numpy().random.get_state(legacy=False))

    def restore(self) -> None:
        torch = _torch()
        if torch is not None and self.host is not None:
            torch.set_rng_state(self.host)
        if torch is not None and self.devices:
            torch.cuda.set_rng_state_all(self.devices)
        random.setstate(self.python)
        _numpy().random.set_state(self.numpy)

    def differs(self) -> str:
        """The first generator whose state is another one now: `torch`, `numpy.random` or `random`; "" if none
        is."""
        now = Generators.now()
        if self.host is not None and not (
            self.host.equal(now.host)
            and all(a.equal(b) for a, b in zip(self.devices, now.devices, strict=False))
        ):
            return "torch"
        if self.python != now.python:
            return "random"
        mine, theirs = ({**state.numpy, **state.numpy["state"], "state": 0} for state in (self, now))
        same = all(bool(_numpy().all(value == theirs.get(name))) for name, value in mine.items())
        return "" if same else "numpy.random"


def alone(work: Callable[..., T], *arguments: Any) -> T:
    """Call it while no record that draws random numbers is read."""
    with ALONE:
        return work(*arguments)


@contextmanager
def alone_if_free() -> Iterator[bool]:
    """True: no other thread draws in the block. False, at once: one does."""
    free = ALONE.acquire(blocking=False)
    try:
        yield free
    finally:
        if free:
            ALONE.release()


def seed_everything(seed: int) -> None:
    """All generators that a script's code may use. `seed`: of 63 bits."""
    torch = _torch()
    if torch is not None and _has_accelerator():
        torch.manual_seed(seed)
    elif torch is not None:
        # as torch.manual_seed, which asks for devices each time: 0.5 ms
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    _numpy().random.seed(seed & 0xFFFFFFFF)


@contextmanager
def undisturbed(*, alone: bool = True) -> Iterator[None]:
    """After the block all generators are as they were. `alone`: no other thread draws meanwhile; not in a
    process that works for several jobs, none of which may wait for the code of another."""
    with ALONE if alone else nullcontext():
        before = Generators.now()
        try:
            yield
        finally:
            before.restore()


@contextmanager
def seeded(seed: int, *, alone: bool = True) -> Iterator[None]:
    """The block draws what `seed` says; after it all generators are as they were."""
    with undisturbed(alone=alone):
        seed_everything(seed)
        yield


def drawing(seed: int, code: Callable[..., T], *arguments: Any) -> T:
    """What `code(*arguments)` returns, see `seeded`."""
    with seeded(seed):
        return code(*arguments)


def _torch() -> Any:
    """torch, if this process has imported it."""
    module = sys.modules.get("torch")
    return module if hasattr(module, "default_generator") else None


@cache
def _numpy() -> Any:
    import numpy as np  # noqa: PLC0415  whoever imports this module need not run code of a script

    return np


@cache
def _has_accelerator() -> bool:
    return bool(_torch().accelerator.is_available())

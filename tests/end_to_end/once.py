"""Parameters that several tests compare with: trained by the first process of `pytest -n` that needs them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

Parameters = dict[str, torch.Tensor]


def made_once(name: str, folders: pytest.TempPathFactory, make: Callable[[Path], Parameters]) -> Parameters:
    """What `make(folder)` gave, here or in another process of this session."""
    session = folders.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        session = session.parent
    made = session / f"undisturbed-{name}.pt"
    with made.with_suffix(".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            torch.save(make(folders.mktemp("undisturbed")), made)
    values: Parameters = torch.load(made, weights_only=True)
    return values

"""Ablations: one function of the product is another one for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    original = vars(owner)[name]  # a static method stays one
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)

"""Ablations: a function of the product, or a number, is another one for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = vars(owner)[name]  # a static method stays one
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)

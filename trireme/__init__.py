"""What a user's script imports: `trireme.Config` and `trireme.data`. Importing it loads neither torch nor pydantic."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from trireme.config import Config

if TYPE_CHECKING:
    from types import ModuleType

    from trireme import data as data

__all__ = ["Config", "__version__", "data"]
__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    if name == "data":
        return importlib.import_module("trireme.data")
    msg = f"module 'trireme' has no attribute {name!r}"
    raise AttributeError(msg)

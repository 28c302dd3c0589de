"""What a user's script imports: `trireme.Config`, `trireme.data`, `trireme.optim`, `trireme.log`, `trireme.train`, and for a loop of its own
`trireme.prepare` and `trireme.backward`. The import loads neither torch nor pydantic."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shared import __version__
from trireme.config import Config

if TYPE_CHECKING:
    from shared.logged_metrics import log as log
    from shared.logged_metrics import log_metrics as log_metrics
    from trireme import data as data
    from trireme import optim as optim
    from trireme.loop import backward as backward
    from trireme.loop import prepare as prepare
    from trireme.plain import train as train

__all__ = ["Config", "__version__", "backward", "data", "log", "log_metrics", "optim", "prepare", "train"]


def __getattr__(name: str) -> Any:
    if name in ("data", "optim"):
        return importlib.import_module(f"trireme.{name}")
    if name in ("log", "log_metrics"):
        return getattr(importlib.import_module("shared.logged_metrics"), name)
    if name == "train":
        return importlib.import_module("trireme.plain").train
    if name in ("prepare", "backward"):
        return getattr(importlib.import_module("trireme.loop"), name)
    msg = f"module 'trireme' has no attribute {name!r}"
    raise AttributeError(msg)

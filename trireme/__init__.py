"""What a user's script imports: `trireme.Config`, `trireme.data`, `trireme.nn` (embedding tables, averages),
`trireme.metrics`, `trireme.optim`, `trireme.log`, `trireme.train`, `trireme.total_steps`, for a
LightningModule `trireme.lightning`, and for a loop of its own `trireme.prepare` and `trireme.backward`, or
`trireme.CollectiveCommunicator`; for programs and notebooks `trireme.run`. The import loads neither torch nor
pydantic."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trireme.config import Config, ConfigError
from trireme.own_names import make_room
from trireme_shared import __version__
from trireme_shared.protocol.errors import TriremeError

if TYPE_CHECKING:
    from trainer_agent.own_loop.job_steps import steps_per_epoch as steps_per_epoch
    from trainer_agent.own_loop.job_steps import total_steps as total_steps
    from trainer_agent.script.lightning import lightning as lightning
    from trireme import data as data
    from trireme import metrics as metrics
    from trireme import nn as nn
    from trireme import optim as optim
    from trireme.background.errors import InvalidSetting as InvalidSetting
    from trireme.background.errors import JobFailed as JobFailed
    from trireme.background.errors import JobStopped as JobStopped
    from trireme.background.errors import WaitTimedOut as WaitTimedOut
    from trireme.background.run import Run as Run
    from trireme.background.run import run as run
    from trireme.communicator import CollectiveCommunicator as CollectiveCommunicator
    from trireme.communicator_status import FAILED as FAILED
    from trireme.communicator_status import SUCCEEDED as SUCCEEDED
    from trireme.communicator_status import Status as Status
    from trireme.loop import backward as backward
    from trireme.loop import prepare as prepare
    from trireme.plain import train as train
    from trireme_shared.protocol.metrics import log as log
    from trireme_shared.protocol.metrics import log_metrics as log_metrics

__all__ = [
    "FAILED",
    "SUCCEEDED",
    "CollectiveCommunicator",
    "Config",
    "ConfigError",
    "InvalidSetting",
    "JobFailed",
    "JobStopped",
    "Run",
    "Status",
    "TriremeError",
    "WaitTimedOut",
    "__version__",
    "backward",
    "data",
    "lightning",
    "log",
    "log_metrics",
    "metrics",
    "nn",
    "optim",
    "prepare",
    "run",
    "steps_per_epoch",
    "total_steps",
    "train",
]

make_room()

_HOMES = {
    "FAILED": "trireme.communicator_status",
    "SUCCEEDED": "trireme.communicator_status",
    "CollectiveCommunicator": "trireme.communicator",
    "InvalidSetting": "trireme.background.errors",
    "JobFailed": "trireme.background.errors",
    "JobStopped": "trireme.background.errors",
    "Run": "trireme.background.run",
    "Status": "trireme.communicator_status",
    "WaitTimedOut": "trireme.background.errors",
    "backward": "trireme.loop",
    "lightning": "trainer_agent.script.lightning",
    "log": "trireme_shared.protocol.metrics",
    "log_metrics": "trireme_shared.protocol.metrics",
    "prepare": "trireme.loop",
    "run": "trireme.background.run",
    "steps_per_epoch": "trainer_agent.own_loop.job_steps",
    "total_steps": "trainer_agent.own_loop.job_steps",
    "train": "trireme.plain",
}


def __getattr__(name: str) -> Any:
    if name in ("data", "metrics", "nn", "optim"):
        return importlib.import_module(f"trireme.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    msg = f"module 'trireme' has no attribute {name!r}"
    raise AttributeError(msg)

"""A collective job that trains until it is stopped, without checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer_agent.script import user_module
from trireme.plain import plain_spec
from trireme_shared.protocol.records import Strategy
from trireme_shared.protocol.records.job_spec import JobSpec


def endless(script: Path, folder: Path, trainers: int, lanes: int, **more: Any) -> JobSpec:
    plain = plain_spec(user_module.load(script), {})
    changes: dict[str, Any] = {
        "strategy": Strategy.COLLECTIVE,
        "trainers": trainers,
        "pservers": 0,
        "lanes": lanes,
        "epochs": 100_000,
        "checkpoint_every_epochs": None,
        "checkpoint_every_seconds": None,
        "checkpoint_every_steps": None,
        "storage": str(folder),
        **more,
    }
    return type(plain).model_validate({**plain.model_dump(), **changes})

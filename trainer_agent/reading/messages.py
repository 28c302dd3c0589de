"""What a trainer asks of the processes that read for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trireme_shared.protocol.records import JobSpec


@dataclass(frozen=True, slots=True)
class Setup:
    """What the template is to read. `script`: where it is on this host."""

    spec: JobSpec
    script: Path


@dataclass(frozen=True, slots=True)
class Asked:
    """One minibatch: records of `file`, by number. `epoch`: see trainer_agent.data.in_code.reading."""

    held_out: bool
    epoch: int
    file: str
    numbers: list[int]
    stamp: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Fork worker `number`, which serves the socket that comes with this."""

    number: int


@dataclass(frozen=True, slots=True)
class Ended:
    """How did this worker end?"""

    pid: int

"""Settings of a host agent, from the environment: TRIREME_ETCD, TRIREME_TRAINERS, TRIREME_PSERVERS,
TRIREME_NAME, ..."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from trireme.launch.bounded_logs import LOG_BYTES, LOGS_BYTES
from trireme_shared.platform.membership.settings import MemberSettings
from trireme_shared.platform.runtime.limits import cores
from trireme_shared.platform.runtime.variables import without_service_links

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9.]+")
_GPU = re.compile(r"nvidia\d+")
# settings of the agent alone; all other TRIREME_* variables of its environment reach its children
OWN = (
    *(
        "JOB",
        "SPEC",
        "TRAINERS",
        "PSERVERS",
        "NAME",
        "DATA_DIR",
        "PORT",
        "AGENT_TTL_S",
        "READY_FILE",
        "SOURCES",
    ),
    *("NODE", "CORES", "BEGUN_FILE", "LAST_END", "LOG_BYTES", "LOGS_BYTES"),
)


def gpus() -> int:
    """How many NVIDIA GPUs this host has; 0 if CUDA_VISIBLE_DEVICES hides them. torch is not loaded for
    this."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return 0
    return sum(bool(_GPU.fullmatch(path.name)) for path in Path("/dev").glob("nvidia*"))


def default_trainers() -> int:
    """One for each GPU; else one for each core but one, and at least one."""
    return gpus() or max(1, cores() - 1)


class Settings(MemberSettings):
    """`trainers`, `pservers`: places of each kind. `name`: of this host in the pool; its places are
    `<name>-trainer-0`, ... `data_dir`: logs and scripts. `node`: the machine's name in the pool, by which
    members are placed together or apart ("": its host name). `cores`: how many of them the places share (0:
    all). `agent_ttl_s`: TTL of the places' lease, so how long the places of a dead host are waited for.
    `drain_seconds`: how long a child may take to leave. `log_bytes`: of one log, then it begins again;
    `logs_bytes`: of all logs together. Durations in seconds."""

    job: str = ""
    name: str = Field(
        default_factory=lambda: _NOT_IN_NAMES.sub("-", socket.gethostname()).strip("-.") or "host",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]{0,63}$",
    )
    trainers: int = Field(default_factory=default_trainers, ge=0, le=1024)
    pservers: int = Field(default=1, ge=0, le=128)
    data_dir: Path = Path(".trireme-host")
    node: str = Field(default="", max_length=200)
    cores: int = Field(default=0, ge=0, le=4096)
    agent_ttl_s: float = Field(default=5.0, ge=2.0)
    drain_seconds: float = Field(default=20.0, ge=0)
    log_bytes: int = Field(default=LOG_BYTES, ge=1 << 16)
    logs_bytes: int = Field(default=LOGS_BYTES, ge=1 << 20)


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """What children get of an agent's own TRIREME_* variables."""
    own = {f"TRIREME_{name}" for name in OWN}
    given = without_service_links(environment)
    return {name: value for name, value in given.items() if name.startswith("TRIREME_") and name not in own}

"""Settings of one parameter server, from the environment: TRIREME_JOB, TRIREME_ETCD, TRIREME_PORT, ..."""

from __future__ import annotations

from pydantic import Field

from trireme_shared.platform.membership.settings import MemberSettings


class Settings(MemberSettings):
    """`uds`: also listen on this UNIX socket, or on one in this folder, named as the process is. `threads`:
    of torch. Durations in seconds: a peer may be silent for `stall_s` inside a message and for `idle_s`
    between blocks; a pull waits at most `max_wait_s`, a claim `claim_wait_s`; asked to leave, it saves its
    parameters for at most `drain_seconds` (see docs/checkpoints.md)."""

    uds: str = ""
    name: str = "pserver"
    threads: int = Field(default=1, ge=1)
    stall_s: float = Field(default=30.0, gt=0)
    idle_s: float = Field(default=900.0, gt=0)
    max_wait_s: float = Field(default=60.0, gt=0)
    claim_wait_s: float = Field(default=300.0, gt=0)
    drain_seconds: float = Field(default=20.0, ge=0)

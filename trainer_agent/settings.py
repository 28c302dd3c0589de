"""Settings of one trainer, from the environment: TRIREME_JOB, TRIREME_ETCD, TRIREME_NAME, ..."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.membership.settings import MemberSettings


class Settings(MemberSettings):
    """`transport` to parameter servers: `auto` is the fastest way both ends have, `shm`
    the upgraded stream over a UNIX socket with payloads in shared memory, `unix` without, `tcp` the stream over TCP, `http`
    plain requests. `shm` and `unix` need a socket, so both ends on one host. Durations in seconds; what the job is, is in its spec, not here."""

    name: str = "trainer"
    transport: Literal["auto", "shm", "unix", "tcp", "http"] = "auto"
    stall_s: float = Field(default=30.0, gt=0)
    spec_wait_s: float = Field(default=300.0, gt=0)

"""Settings of one trainer, from the environment: TRIREME_JOB, TRIREME_ETCD, TRIREME_NAME, ..."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trireme_shared.platform.membership.settings import MemberSettings


class Settings(MemberSettings):
    """`transport` to parameter servers:

        auto   the fastest that both ends have             unix   over a UNIX socket, payloads on the stream
        shm    over a UNIX socket, payloads in shared memory     tcp    over TCP

    `shm` and `unix` need both ends on one host. In a collective job all of that is between trainers: each
    serves its share at `exchange_port` (0: a free one), and at the UNIX socket `uds`, or one in this folder,
    named as the process is. A peer may be silent for `stall_s` inside a message and for `idle_s` between
    blocks; a pull waits at most `max_wait_s`. Durations are in seconds. Settings of the job itself are in its
    spec."""

    name: str = "trainer"
    transport: Literal["auto", "shm", "unix", "tcp"] = "auto"
    stall_s: float = Field(default=30.0, gt=0)
    exchange_port: int = Field(default=0, ge=0, le=65535)
    uds: str = ""
    idle_s: float = Field(default=900.0, gt=0)
    max_wait_s: float = Field(default=60.0, gt=0)
    spec_wait_s: float = Field(default=300.0, gt=0)

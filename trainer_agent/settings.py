"""Settings of one trainer, from the environment: TRIREME_JOB, TRIREME_ETCD, TRIREME_NAME, ..."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.membership.settings import MemberSettings


class Settings(MemberSettings):
    """`transport` to parameter servers:

        auto   the fastest that both ends have             tcp    the upgraded stream over TCP
        shm    over a UNIX socket, payloads in shared memory     http   plain requests
        unix   over a UNIX socket, payloads on the stream

    `shm` and `unix` need both ends on one host. Durations are in seconds. Settings of the job itself are in its spec."""

    name: str = "trainer"
    transport: Literal["auto", "shm", "unix", "tcp", "http"] = "auto"
    stall_s: float = Field(default=30.0, gt=0)
    spec_wait_s: float = Field(default=300.0, gt=0)

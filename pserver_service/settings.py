"""Settings of one parameter server, from the environment: TRIREME_JOB, TRIREME_ETCD, TRIREME_PORT, ..."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict


class Settings(BaseSettings):
    """`uds`: also listen on this UNIX socket. `threads`: of torch. Durations in seconds: a peer may be silent
    for `stall_s` inside a message and for `idle_s` between blocks; a pull waits at most `max_wait_s`, a claim `claim_wait_s`."""

    model_config = SettingsConfigDict(env_prefix="TRIREME_", frozen=True)

    job: str
    root: str = "trireme"
    etcd: Annotated[tuple[str, ...], NoDecode] = ("http://127.0.0.1:2379",)
    etcd_user: str = ""
    etcd_password: str = ""
    etcd_ca: str = ""
    etcd_cert: str = ""
    etcd_key: str = ""
    token: str = ""
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    advertise: str = ""
    uds: str = ""
    name: str = "pserver"
    log_level: str = "INFO"
    threads: int = Field(default=1, ge=1)
    stall_s: float = Field(default=30.0, gt=0)
    idle_s: float = Field(default=900.0, gt=0)
    max_wait_s: float = Field(default=60.0, gt=0)
    claim_wait_s: float = Field(default=300.0, gt=0)

    @field_validator("etcd", mode="before")
    @classmethod
    def _urls(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

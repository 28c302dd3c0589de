"""Settings of one trainer, from the environment: TRIREME_JOB, TRIREME_ETCD, TRIREME_NAME, ..."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict


class Settings(BaseSettings):
    """`advertise`: the host that peers use. Durations in seconds; what the job is, is in its spec, not here."""

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
    name: str = "trainer"
    log_level: str = "INFO"
    stall_s: float = Field(default=30.0, gt=0)
    spec_wait_s: float = Field(default=300.0, gt=0)

    @field_validator("etcd", mode="before")
    @classmethod
    def _urls(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

"""The settings that every member reads from the environment: its job, its etcd, where it listens."""

from __future__ import annotations

import socket
import sys
from typing import Annotated, Self

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from shared.etcd import Etcd
from shared.membership.etcd_access import EtcdAccess, split

CONFIGURATION = 2  # exit code of a process whose settings cannot be used


class MemberSettings(BaseSettings):
    """TRIREME_JOB, TRIREME_ETCD (urls with commas between), ... `advertise`: the host that peers use. `sources`: the folder for
    scripts that come from etcd or from a URL; "": a folder of this user below the system's temporary one."""

    model_config = SettingsConfigDict(env_prefix="TRIREME_", frozen=True)

    job: str
    root: str = "trireme"
    etcd: Annotated[tuple[str, ...], NoDecode] = ("http://127.0.0.1:2379",)
    etcd_user: str = ""
    etcd_password: str = ""
    etcd_password_file: str = ""
    etcd_ca: str = ""
    etcd_cert: str = ""
    etcd_key: str = ""
    token: str = ""
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    advertise: str = ""
    sources: str = ""
    log_level: str = "INFO"

    @field_validator("etcd", mode="before")
    @classmethod
    def _urls(cls, value: object) -> object:
        return split(value) if isinstance(value, str) else value

    @classmethod
    def from_environment(cls) -> Self:
        """Names each variable that is wrong on standard error, and ends the process with CONFIGURATION."""
        try:
            return cls()
        except ValidationError as error:
            for item in error.errors():
                sys.stderr.write(f"TRIREME_{'_'.join(map(str, item['loc'])).upper()}: {item['msg']}\n")
        sys.exit(CONFIGURATION)

    @property
    def advertised(self) -> str:
        """The host as part of a URL that peers use."""
        host = self.advertise or self.host
        if host in {"0.0.0.0", "::"}:
            host = socket.gethostname()
        return f"[{host}]" if ":" in host else host

    @property
    def etcd_access(self) -> EtcdAccess:
        return EtcdAccess(
            self.etcd,
            user=self.etcd_user,
            password=self.etcd_password,
            password_file=self.etcd_password_file,
            ca=self.etcd_ca,
            cert=self.etcd_cert,
            key=self.etcd_key,
        )

    def connect(self) -> Etcd:
        """A client of the job's etcd; close it at the end."""
        return self.etcd_access.connect()

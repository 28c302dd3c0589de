"""The settings that every member reads from the environment: its job, its etcd, where it listens."""

from __future__ import annotations

import socket
import sys
import threading
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.etcd_access import EtcdAccess, split
from trireme_shared.platform.runtime import telemetry
from trireme_shared.platform.runtime.telemetry import hidden
from trireme_shared.platform.runtime.variables import without_service_links
from trireme_shared.platform.security.access import Access, is_loopback
from trireme_shared.platform.security.tls import Tls
from trireme_shared.platform.security.tokens import OwnToken, Tokens, parse_table
from trireme_shared.protocol.records.job_choices import name_problem

TOKENS = ("token", "token_file", "tokens", "tokens_file")
CONFIGURATION = 2  # exit code of a process whose settings cannot be used

Read = TypeVar("Read", bound=BaseSettings)

log = telemetry.logger("settings")


def read(kind: type[Read]) -> Read:
    """The settings of this process. Names each variable that is wrong on standard error, and ends the process
    with CONFIGURATION."""
    try:
        return kind()
    except ValidationError as error:
        for item in error.errors():
            sys.stderr.write(f"{_problem(item)}\n")
    sys.exit(CONFIGURATION)


def _problem(item: Any) -> str:
    name, value = "_".join(map(str, item["loc"])), item["input"]
    given = f"={value}" if isinstance(value, str) else ""
    return hidden(f"TRIREME_{name.upper()}{given}: {item['msg']}")


def _look_up(host: str) -> None:
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        log.warning(
            "own_name_unknown",
            host=host,
            cause=f"{host} cannot be looked up: {error.strerror}",
            hint="set TRIREME_ADVERTISE to a name or an address by which peers reach this process",
        )


def of_environment(variables: PydanticBaseSettingsSource) -> PydanticBaseSettingsSource:
    """The variables of the environment as settings, without those of service links."""
    assert isinstance(variables, EnvSettingsSource)
    given = {name: value for name, value in variables.env_vars.items() if value is not None}
    variables.env_vars = without_service_links(given)
    return variables


class MemberSettings(BaseSettings):
    """TRIREME_JOB, TRIREME_ETCD (urls with commas between), ... `token`, or the content of `token_file`: what
    this process shows to others; it accepts it, too, with all roles, unless `tokens_file` is a table of those
    that it accepts, or `tokens` such a table as text. `advertise`: the host that peers use. `allowed_hosts`:
    more names by which requests may call this service. `tls_...`: see Tls. `sources`: the folder for scripts
    that come from etcd or from a URL; "": a folder of this user below the system's temporary one."""

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
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_mutual: bool = False
    token: str = ""
    token_file: Path | None = None
    tokens: str = ""
    tokens_file: Path | None = None
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    advertise: str = ""
    sources: str = ""
    log_level: str = "INFO"

    @field_validator("etcd", "allowed_hosts", mode="before")
    @classmethod
    def _parts(cls, value: object) -> object:
        return split(value) if isinstance(value, str) else value

    @field_validator("job")
    @classmethod
    def _may_be_a_job(cls, value: str) -> str:
        if value and (problem := name_problem(value)):
            raise ValueError(problem)
        return value

    @field_validator("token_file", "tokens_file", mode="before")
    @classmethod
    def _no_file(cls, value: object) -> object:
        return value or None

    @field_validator("host")
    @classmethod
    def _protected(cls, value: str, info: ValidationInfo) -> str:
        if not (is_loopback(value) or any(info.data.get(name) for name in TOKENS)):
            msg = (
                f"{value} lets other hosts reach this process, and no token protects it; set "
                "TRIREME_TOKEN or TRIREME_TOKENS_FILE"
            )
            raise ValueError(msg)
        return value

    @classmethod
    def from_environment(cls) -> Self:
        """As `read`."""
        return read(cls)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments before the environment."""
        return init_settings, of_environment(env_settings)

    def look_up_own_name(self) -> None:
        """Tell in the log if the host that peers use has a name without an address: nobody would reach this
        process, and only they would notice. It does not end the process: in Kubernetes a name may get its
        address once the process is ready. Does not wait."""
        host = self.advertised.strip("[]")
        threading.Thread(target=_look_up, args=(host,), name="own name", daemon=True).start()

    @property
    def advertised(self) -> str:
        """The host as part of a URL that peers use."""
        host = self.advertise or self.host
        if host in {"0.0.0.0", "::"}:
            host = socket.gethostname()
        return f"[{host}]" if ":" in host else host

    @property
    def access(self) -> Access:
        """Who may use this process. Raises InvalidArgument: the table of tokens cannot be used."""
        hosts = (self.host, self.advertise, self.advertised, *self.allowed_hosts)
        table = parse_table(self.tokens, "TRIREME_TOKENS") if self.tokens else None
        return Access.of(Tokens(self.tokens_file, self.own_token(), table), hosts)

    @cached_property
    def own_token(self) -> OwnToken:
        """Raises InvalidArgument: its file cannot be used."""
        return OwnToken(self.token, self.token_file)

    @property
    def tls(self) -> Tls:
        return Tls(self.tls_ca, self.tls_cert, self.tls_key, self.tls_mutual)

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

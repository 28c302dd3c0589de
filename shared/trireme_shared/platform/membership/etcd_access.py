"""How to reach the job's etcd: addresses, user, certificates. The password comes from the environment or a
file, never from a record."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from trireme_shared.platform.etcd import Etcd, connect
from trireme_shared.platform.runtime.telemetry import without_user
from trireme_shared.protocol.errors import InvalidArgument

PASSWORD = "TRIREME_ETCD_PASSWORD"  # noqa: S105  the variable's name


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """`urls`: a user and a password in them are left out. `password_file`: its first line is the password, if
    `password` is empty. `ca`, `cert`, `key`: PEM files."""

    urls: tuple[str, ...]
    user: str = ""
    password: str = field(default="", repr=False)
    password_file: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "urls", tuple(map(without_user, self.urls)))

    def __str__(self) -> str:
        return ", ".join(self.urls)

    def connect(self, *, share_watches: bool = False) -> Etcd:
        """A client; close it at the end. `share_watches`: all over one connection. Raises InvalidArgument if
        an address or a file cannot be used."""
        login = {"user": self.user, "password": self._password()}
        files = {"ca": self.ca, "cert": self.cert, "key": self.key}
        return connect(self.urls, **login, **files, share_watches=share_watches)

    def _password(self) -> str:
        if self.password or not self.password_file:
            return self.password
        try:
            return Path(self.password_file).read_text(encoding="utf-8").partition("\n")[0].rstrip("\r")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(
                f"the password file {self.password_file} of etcd cannot be read: {error}"
            ) from error

    def environment(self) -> dict[str, str]:
        """The TRIREME_ETCD* variables of a member."""
        found = {"TRIREME_ETCD": ",".join(self.urls)}
        found |= {
            f"TRIREME_ETCD_{name.upper()}": getattr(self, name) for name in _NAMES if getattr(self, name)
        }
        return found | ({PASSWORD: self.password} if self.password else {})

    def facts(self) -> dict[str, str]:
        """For a file that other commands read: without the password."""
        found = {"etcd": ",".join(self.urls)}
        return found | {f"etcd_{name}": getattr(self, name) for name in _NAMES if getattr(self, name)}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Self:
        """From `facts`; the password is that of the environment."""
        given = {name: str(facts.get(f"etcd_{name}", "")) for name in _NAMES}
        return cls(split(str(facts["etcd"])), password=environment.get(PASSWORD, ""), **given)


_NAMES = tuple(each.name for each in fields(EtcdAccess) if each.name not in ("urls", "password"))


def split(urls: str) -> tuple[str, ...]:
    """Of addresses with commas between."""
    return tuple(part.strip() for part in urls.split(",") if part.strip())

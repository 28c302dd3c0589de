"""TLS of a process: its certificate, and the authority whose certificates it trusts. All are files in PEM.

server(): for what it serves        client(): for whom it calls; shows the certificate to peers that ask for one (mutual TLS)
None: it serves, or calls, without TLS, or with the authorities of the system

`trireme certs` makes an authority and certificates for a small cluster.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

from shared.errors import InvalidArgument

PREFIX = "TRIREME_TLS_"
VARIABLES = ("TRIREME_TLS_CA", "TRIREME_TLS_CERT", "TRIREME_TLS_KEY", "TRIREME_TLS_MUTUAL")
VERSION = ssl.TLSVersion.TLSv1_2


@dataclass(frozen=True, slots=True)
class Tls:
    """`cert` and `key` (which may be in `cert`, too): the own ones. `ca`: of those that are trusted; "": what the system trusts.
    `mutual`: clients must show a certificate of `ca`."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    mutual: bool = False

    def __bool__(self) -> bool:
        """Whether anything of it was given."""
        return bool(self.ca or self.cert or self.key or self.mutual)

    @property
    def scheme(self) -> str:
        """Of the URLs at which the process serves."""
        return "https" if self.cert else "http"

    def check(self) -> None:
        """Raises InvalidArgument: files are missing or cannot be used, together or at all."""
        self.server()
        self.client()

    def server(self) -> ssl.SSLContext | None:
        """Raises InvalidArgument."""
        if not self.cert:
            if self.key or self.mutual:
                what = "TRIREME_TLS_KEY" if self.key else "TRIREME_TLS_MUTUAL"
                raise InvalidArgument(f"{what} needs TRIREME_TLS_CERT, the certificate of this process")
            return None
        if self.mutual and not self.ca:
            raise InvalidArgument("TRIREME_TLS_MUTUAL needs TRIREME_TLS_CA: whose certificates clients must have")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = VERSION
        self._load(context, trusts=self.mutual)
        if self.mutual:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client(self) -> ssl.SSLContext | None:
        """Checks that a server's certificate is of `ca` and names the host that was called. Raises InvalidArgument."""
        if not (self.ca or self.cert):
            return None
        context = ssl.create_default_context() if not self.ca else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = VERSION
        self._load(context, trusts=bool(self.ca))
        return context

    def environment(self) -> dict[str, str]:
        """The TRIREME_TLS_* variables of a member or a command."""
        found = {f"{PREFIX}{each.name.upper()}": getattr(self, each.name) for each in fields(self)}
        return {name: "1" if value is True else str(Path(value).absolute()) for name, value in found.items() if value}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Of a command; members read theirs with their other settings."""
        given = {each: environment.get(f"{PREFIX}{each.upper()}", "") for each in ("ca", "cert", "key")}
        return cls(**given, mutual=environment.get(f"{PREFIX}MUTUAL", "").lower() in {"1", "true", "yes", "on"})

    def _load(self, context: ssl.SSLContext, *, trusts: bool) -> None:
        part, path = "TRIREME_TLS_CA", self.ca
        try:
            if trusts:
                context.load_verify_locations(cafile=self.ca)
            if self.cert:
                part, path = "TRIREME_TLS_CERT, TRIREME_TLS_KEY", ", ".join(filter(None, (self.cert, self.key)))
                context.load_cert_chain(self.cert, self.key or None, password=_no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            hint = "give files in PEM; `trireme certs` makes some"
            raise InvalidArgument(f"{part}: {path} cannot be used: {error}", hint=hint) from error


def client_context() -> ssl.SSLContext | None:
    """Of a command's environment. Raises InvalidArgument."""
    return Tls.from_environment().client()


def _no_password() -> str:
    """Without it, a key with a password would be asked for at the terminal."""
    raise ValueError("the key is encrypted; give one without a password, readable by this user alone")

"""TLS of a process: its certificate, and the authority whose certificates it trusts. All are files in PEM.

server(): for what it serves        client(): for whom it calls; shows the certificate to peers that ask for
                                    one (mutual TLS)
None: it serves, or calls, without TLS, or with the authorities of the system

The files are looked at again at most once in LOOK_S, when a connection begins: renewed ones need no restart.
`trireme certs` makes an authority and certificates for a small cluster.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.errors import InvalidArgument

PREFIX = "TRIREME_TLS_"
VARIABLES = ("TRIREME_TLS_CA", "TRIREME_TLS_CERT", "TRIREME_TLS_KEY", "TRIREME_TLS_MUTUAL")
VERSION = ssl.TLSVersion.TLSv1_2
LOOK_S = 1.0

log = telemetry.logger("tls")


@dataclass(frozen=True, slots=True)
class Tls:
    """`cert` and `key` (which may be in `cert`, too): the own ones. `ca`: of those that are trusted; "": what
    the system trusts. `mutual`: clients must show a certificate of `ca`."""

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
            raise InvalidArgument(
                "TRIREME_TLS_MUTUAL needs TRIREME_TLS_CA: whose certificates clients must have"
            )
        return _Following(ssl.PROTOCOL_TLS_SERVER, self._files, self._server)

    def client(self) -> ssl.SSLContext | None:
        """Checks that a server's certificate is of `ca` and names the host that was called. Raises
        InvalidArgument."""
        if not (self.ca or self.cert):
            return None
        return _Following(ssl.PROTOCOL_TLS_CLIENT, self._files, self._client)

    def environment(self) -> dict[str, str]:
        """The TRIREME_TLS_* variables of a member or a command."""
        found = {f"{PREFIX}{each.name.upper()}": getattr(self, each.name) for each in fields(self)}
        return {
            name: "1" if value is True else str(Path(value).absolute())
            for name, value in found.items()
            if value
        }

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Of a command; members read theirs with their other settings."""
        given = {each: environment.get(f"{PREFIX}{each.upper()}", "") for each in ("ca", "cert", "key")}
        return cls(
            **given, mutual=environment.get(f"{PREFIX}MUTUAL", "").lower() in {"1", "true", "yes", "on"}
        )

    @property
    def _files(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.ca, self.cert, self.key)))

    def _server(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = VERSION
        self._load(context, trusts=self.mutual)
        if self.mutual:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _client(self) -> ssl.SSLContext:
        context = ssl.create_default_context() if not self.ca else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = VERSION
        self._load(context, trusts=bool(self.ca))
        return context

    def _load(self, context: ssl.SSLContext, *, trusts: bool) -> None:
        part, path = "TRIREME_TLS_CA", self.ca
        try:
            if trusts:
                context.load_verify_locations(cafile=self.ca)
            if self.cert:
                part, path = (
                    "TRIREME_TLS_CERT, TRIREME_TLS_KEY",
                    ", ".join(filter(None, (self.cert, self.key))),
                )
                context.load_cert_chain(self.cert, self.key or None, password=_no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            hint = "give files in PEM; `trireme certs` makes some"
            raise InvalidArgument(f"{part}: {path} cannot be used: {error}", hint=hint) from error


class _Following(ssl.SSLContext):
    """Each connection begins with what the files hold now. If they cannot be used, or not together (one of
    two is replaced already), with what they held before. A context of its own for each content: from one that
    is loaded again nothing is ever taken away."""

    def __new__(cls, protocol: int, *_: object) -> Self:
        return super().__new__(cls, protocol)

    def __init__(self, _: int, files: tuple[str, ...], make: Callable[[], ssl.SSLContext]) -> None:
        """Raises what `make` raises."""
        self._files, self._make = files, make
        self._protocols: list[str] | None = None
        self._seen, self._context = _state_of(files), make()
        self._next = clock.monotonic() + LOOK_S

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        return self._now().wrap_bio(*arguments, **options)

    def wrap_socket(self, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        return self._now().wrap_socket(*arguments, **options)

    def set_alpn_protocols(self, alpn_protocols: Any) -> None:
        self._protocols = list(alpn_protocols)
        self._context.set_alpn_protocols(self._protocols)

    def _now(self) -> ssl.SSLContext:
        now = clock.monotonic()
        if now < self._next:
            return self._context
        self._next = now + LOOK_S
        seen = _state_of(self._files)  # before they are read: what changes meanwhile is seen the next time
        if seen != self._seen:
            self._seen = seen
            try:
                context = self._make()
            except InvalidArgument as error:
                log.warning("certificates_not_renewed", cause=error.message)
            else:
                if self._protocols is not None:
                    context.set_alpn_protocols(self._protocols)
                self._context = context
                log.info("certificates_renewed", files=self._files)
        return self._context


def _state_of(files: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Another one if a file was changed, replaced or made."""
    states: list[tuple[int, ...]] = []
    for each in files:
        try:
            found = Path(each).stat()
            states.append((found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
        except OSError:
            states.append(())
    return states


def client_context() -> ssl.SSLContext | None:
    """Of a command's environment. Raises InvalidArgument."""
    return Tls.from_environment().client()


def _no_password() -> str:
    """Without it, a key with a password would be asked for at the terminal."""
    raise ValueError("the key is encrypted; give one without a password, readable by this user alone")

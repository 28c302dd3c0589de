"""Whether a request may be served: its token and role, the host it names, and the web page it comes from.

Host  ──► a name of this service? else 421: a web page whose name was pointed at this address (DNS rebinding)
          gets no answer
Origin ─► none, or this service's own? else 403: pages of other sites can send requests, but not read or
          change anything here
token ──► known? else 401; does its role include the one that the route needs? else 403

Refusals are in the log of the process, one line for each kind within REFUSALS_S: whoever reaches the port can
cause any number of them.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from trireme_shared.platform.runtime import telemetry
from trireme_shared.platform.runtime.telemetry import Tally
from trireme_shared.platform.security.tokens import Role, Tokens
from trireme_shared.protocol.errors import (
    CallerError,
    Forbidden,
    ForeignOrigin,
    Unauthorized,
    UnknownHost,
    UnsupportedMediaType,
)

BEARER = "bearer "
HOST_CHARACTERS = 300  # a name has at most 255
KNOWN_HOSTS = 256  # every request names its host, and few names occur
CHALLENGE = 'Bearer realm="trireme"'
READING = frozenset({"GET", "HEAD", "OPTIONS"})
FORMS = frozenset(
    {"application/x-www-form-urlencoded", "multipart/form-data", "text/plain"}
)  # pages may send these anywhere
SAME_SITE = frozenset({"", "same-origin", "none"})  # of Sec-Fetch-Site; none: typed by a person
REFUSALS_S = 10.0

log = telemetry.logger("access")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request says of itself; "" where the header is missing. `address`: of the host where the
    connection arrived, "" for a UNIX socket; `peer`: of who asks. `request_id`: as the answer names it."""

    method: str
    host: str = ""
    origin: str = ""
    fetch_site: str = ""
    content_type: str = ""
    authorization: str = ""
    address: str = ""
    peer: str = ""
    request_id: str = ""

    @classmethod
    def of(cls, method: str, headers: Mapping[str, str], sockname: object, peername: object = None) -> Asked:
        """`headers`: found whatever the case of their names; `sockname`, `peername`: of both ends of the
        connection."""
        return cls(
            method,
            host=headers.get("Host", ""),
            origin=headers.get("Origin", ""),
            fetch_site=headers.get("Sec-Fetch-Site", ""),
            content_type=headers.get("Content-Type", ""),
            authorization=headers.get("Authorization", ""),
            address=str(sockname[0]) if isinstance(sockname, tuple) else "",
            peer=str(peername[0]) if isinstance(peername, tuple) else "",
        )


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request. `token`: the name of the token, never the token; "": nobody is asked for one.
    `address`: of the connection, "" for a UNIX socket."""

    role: Role
    token: str = ""
    address: str = ""

    def __str__(self) -> str:
        parts = (f"token {self.token}" if self.token else "", self.address)
        return " at ".join(part for part in parts if part) or "REST"


#: Of the request that this task serves; None: it serves none, or nobody is asked who sends it.
CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


@dataclass(frozen=True, slots=True)
class Access:
    """`hosts`: names and addresses of this service, besides those of loopback."""

    tokens: Tokens = field(default_factory=Tokens)
    hosts: frozenset[str] = frozenset()
    _refusals: defaultdict[str, Tally] = field(
        init=False, repr=False, compare=False, default_factory=lambda: defaultdict(Tally)
    )

    @classmethod
    def of(cls, tokens: Tokens, hosts: Iterable[str] = ()) -> Access:
        return cls(tokens, frozenset(plain_host(host) for host in hosts if host))

    def admit(self, asked: Asked, needed: Role | None) -> Caller | None:
        """Who asks, with the role that the token has (admin, where nobody is asked for one). `needed` None:
        no token is, and none is looked at. Raises UnknownHost, ForeignOrigin, UnsupportedMediaType,
        Unauthorized, Forbidden."""
        try:
            return self._admit(asked, needed)
        except CallerError as error:
            tally = self._refusals[error.code]
            tally.add()
            if count := tally.due(REFUSALS_S):
                log.warning(
                    "request_refused",
                    count=count,
                    code=error.code,
                    cause=error.message,
                    method=asked.method,
                    peer=asked.peer,
                    request_id=asked.request_id,
                )
            raise

    def _admit(self, asked: Asked, needed: Role | None) -> Caller | None:
        self._check_host(asked)
        _check_page(asked)
        if needed is None:
            return None
        if not self.tokens.required:
            return Caller(Role.ADMIN, address=asked.peer)
        token = bearer_in(asked.authorization)
        found = self.tokens.find(token) if token else None
        if found is None:
            what = "a bearer token that is unknown or has expired" if token else "no bearer token"
            raise Unauthorized(
                f"the request has {what}", hint="give a token in TRIREME_TOKEN or TRIREME_TOKEN_FILE"
            )
        if not found.role.may(needed):
            msg = f"the token {found.name} has the role {found.role}, and this needs the role {needed}"
            raise Forbidden(msg, hint=f"use a token with the role {needed}; `trireme token create` makes one")
        return Caller(found.role, found.name, asked.peer)

    def _check_host(self, asked: Asked) -> None:
        host = plain_host(host_in(asked.host)) if len(asked.host) <= HOST_CHARACTERS else ""
        if not (is_loopback(host) or host in self.hosts or (host and host == plain_host(asked.address))):
            msg = f"{asked.host[:200]!r} is no name of this service"
            raise UnknownHost(msg, hint="add the name to TRIREME_ALLOWED_HOSTS where the service is started")


def _check_page(asked: Asked) -> None:
    """Requests that a browser sends for a page of another site."""
    if asked.origin and urlsplit(asked.origin).netloc.lower() != asked.host.lower():
        raise ForeignOrigin(f"a page of {asked.origin[:200]} must not use this service")
    if asked.method in READING:
        return
    if asked.fetch_site not in SAME_SITE:
        raise ForeignOrigin(f"a {asked.fetch_site[:40]} page must not use this service")
    if asked.content_type.partition(";")[0].strip().lower() in FORMS:
        msg = (
            f"a body of type {asked.content_type[:80]} is what forms of web pages send; send application/json"
        )
        raise UnsupportedMediaType(msg)


def bearer_in(authorization: str) -> str:
    """The token of such a header; "": there is none."""
    is_bearer = authorization[: len(BEARER)].lower() == BEARER
    return authorization[len(BEARER) :].strip() if is_bearer else ""


def host_in(header: str) -> str:
    """The host without the port: `[::1]:80`, `localhost:80`."""
    if header.startswith("["):
        inside, _, port = header[1:].partition("]")
        return inside if not port or port.startswith(":") else header
    return header.rpartition(":")[0] if header.count(":") == 1 else header


@lru_cache(maxsize=KNOWN_HOSTS)
def plain_host(host: str) -> str:
    """One spelling of a name or an address."""
    host = host.strip("[]").rstrip(".").lower()
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = getattr(address, "ipv4_mapped", None)  # a socket of IPv6 that takes IPv4 connections
    return str(mapped or address)


@lru_cache(maxsize=KNOWN_HOSTS)
def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that host; any name but those of localhost may be any address."""
    try:
        return ip_address(plain_host(host)).is_loopback
    except ValueError:
        return plain_host(host) == "localhost"


def family_of(host: str) -> socket.AddressFamily:
    """Of a socket that listens at `host`: IPv6 for such an address, and for a name that has no other."""
    if ":" in host:
        return socket.AF_INET6
    try:
        families = {found[0] for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:  # whoever binds says why
        return socket.AF_INET
    return socket.AF_INET6 if families == {socket.AF_INET6} else socket.AF_INET

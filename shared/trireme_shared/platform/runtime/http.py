"""HTTP clients: sessions with token and limits, JSON calls that raise the errors of
trireme_shared.protocol.errors, and what a refused connection tells. Loopback addresses mean another process
in every network, so it tells nothing about a process elsewhere."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

import aiohttp

from trireme_shared.protocol.errors import DeadlineExceeded, PeerError, TriremeError, Unauthorized, from_map

if TYPE_CHECKING:
    from aiohttp import web

PROBE_TIMEOUT_S = 1.0
MEANT = "Trireme-Pserver"  # header: the incarnation of the pserver that shall answer

Token: TypeAlias = str | Callable[[], str]  # a function is asked before each request: tokens are rotated


async def hide_implementation(_: web.Request, answer: web.StreamResponse) -> None:
    """For `on_response_prepare` of a server: which program of which version answers is nobody's concern."""
    answer.headers.popall("Server", None)


def text_of(token: Token) -> str:
    """As it is now."""
    return token if isinstance(token, str) else token()


def session(
    token: Token = "", *, uds: str = "", tls: ssl.SSLContext | None = None, meant: str = ""
) -> aiohttp.ClientSession:
    """A client session; `uds` routes every request through that UNIX socket. `tls`: for https. `meant`: the
    incarnation of the pserver that shall answer, and no other. Close it (`async with`).

    No total timeout: each call gives its own. Connecting takes at most 2 s.
    """
    connector = (
        aiohttp.UnixConnector(path=uds)
        if uds
        else aiohttp.TCPConnector(limit=0, ttl_dns_cache=60, ssl=tls or True)
    )
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=2.0)

    async def show(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        if given := text_of(token):
            request.headers["Authorization"] = f"Bearer {given}"
        return await send(request)

    middlewares = (show,) if token else ()
    headers = {MEANT: meant} if meant else {}
    return aiohttp.ClientSession(
        connector=connector, headers=headers, middlewares=middlewares, timeout=timeout, auto_decompress=False
    )


async def call_json(
    client: aiohttp.ClientSession,
    method: str,
    url: str,
    body: bytes,
    *,
    timeout_s: float = 10.0,
    headers: dict[str, str] | None = None,
) -> Any:
    """One request; `body` is JSON.

    Raises the TriremeError of the answer's `code`; PeerError if the peer cannot be reached or breaks the
    connection; DeadlineExceeded after `timeout_s`.
    """
    merged = {"Content-Type": "application/json", **(headers or {})}
    try:
        async with asyncio.timeout(timeout_s):
            async with client.request(method, url, data=body, headers=merged) as response:
                if response.status < 400:
                    return await response.json(content_type=None)
                raise await error_of(response)
    except TimeoutError as error:
        msg = f"{method} {url} gave no answer within {timeout_s:g} s"
        raise DeadlineExceeded(msg) from error
    except (aiohttp.ClientError, OSError) as error:
        msg = f"{method} {url} failed: {type(error).__name__}: {error}"
        raise PeerError(msg) from error


async def error_of(response: aiohttp.ClientResponse) -> TriremeError:
    """The exception in an error answer (problem+json or a JSON error map)."""
    try:
        document = await response.json(content_type=None)
    except ValueError:
        document = None
    if isinstance(document, dict) and "code" in document:
        return from_map({"message": document.get("detail", ""), **document})
    if response.status == Unauthorized.status:
        return Unauthorized(f"{response.url} refused the token; give the job's token in TRIREME_TOKEN")
    return PeerError(f"{response.url} answered {response.status} {response.reason}")


async def refuses_connections(url: str) -> bool:
    """True if nothing listens at `url`'s host and port: its process is dead. False if it listens or does not
    answer."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")


@cache
def own_network() -> str:
    """The same text in every process that shares this one's loopback addresses: of one machine, and there of
    one container."""
    try:
        return f"{BOOT_ID.read_text().strip()}/{NETWORK.stat().st_ino}"
    except OSError:  # not Linux: no containers that share a name
        return socket.gethostname()


def tells(url: str, theirs: str, mine: str) -> bool:
    """Whether a connection to `url` that is refused to a process in the network `mine` proves that nothing
    listens there for the process in `theirs` that gave the url."""
    return theirs == mine or not _is_local(urlsplit(url).hostname or "")


def is_here(theirs: str) -> bool:
    """Whether a process in the network `theirs` is on this host, as far as is known (""): then its pid and
    its UNIX sockets mean the same here. Another host may have the same name and the same files."""
    return theirs in ("", own_network())


def _is_local(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified

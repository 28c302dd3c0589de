"""Open an upgraded stream (shared/trireme_shared/serving/transport/stream.py): one HTTP/1.1 request, `101`, then the connection belongs to the stream."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import TypeVar, cast
from urllib.parse import urlsplit

from trireme_shared.platform.runtime.http import MEANT, Token, text_of
from trireme_shared.protocol.errors import AnotherProcess, DeadlineExceeded, Forbidden, PeerError, Unauthorized
from trireme_shared.serving.transport.stream import PATH, UPGRADE, FrameStream

HEAD_BYTES = 16 << 10

Stream = TypeVar("Stream", bound=FrameStream)


class UpgradeRefused(PeerError):
    """The peer does not upgrade: use plain HTTP."""


async def upgrade(
    url: str,
    make: Callable[[], Stream],
    meant: str,
    *,
    uds: str = "",
    token: Token = "",
    tls: ssl.SSLContext | None = None,
    limit_s: float = 2.0,
) -> Stream:
    """A stream to the pserver of the incarnation `meant` at `url`, through the UNIX socket `uds` if one is given; `tls`: for https.
    Raises UpgradeRefused, Unauthorized, Forbidden, AnotherProcess, PeerError."""
    loop, parts = asyncio.get_running_loop(), urlsplit(url)
    where = uds or url
    request = [f"GET {PATH} HTTP/1.1", f"Host: {parts.netloc}", f"Upgrade: {UPGRADE}", "Connection: Upgrade"]
    request.append(f"{MEANT}: {meant}")
    if given := text_of(token):
        request.append(f"Authorization: Bearer {given}")
    handshake: _Handshake | None = None
    try:
        async with asyncio.timeout(limit_s):
            if uds:
                _, handshake = await loop.create_unix_connection(_Handshake, uds)
            else:
                secure = parts.scheme == "https"
                port = parts.port or (443 if secure else 80)
                _, handshake = await loop.create_connection(
                    _Handshake, parts.hostname or "", port, ssl=(tls or True) if secure else None
                )
            head, rest, transport = await handshake.exchange("\r\n".join([*request, "", ""]).encode())
    except TimeoutError as error:
        if handshake is not None:
            handshake.abort()
        msg = f"{where} did not answer within {limit_s:g} s to a request to upgrade"
        raise DeadlineExceeded(msg) from error
    except OSError as error:
        msg = f"connecting to {where} failed: {type(error).__name__}: {error}"
        raise PeerError(msg) from error
    except BaseException:
        if handshake is not None:
            handshake.abort()
        raise
    status = head.split(b"\r\n", 1)[0].split(b" ")
    if len(status) < 2 or not status[0].startswith(b"HTTP/1.") or status[1] != b"101":
        transport.abort()
        if status[1:2] == [b"401"]:
            raise Unauthorized(
                f"{where}: the token was refused", hint="give the cluster's token for members in TRIREME_TOKEN"
            )
        if status[1:2] == [b"403"]:
            raise Forbidden(f"{where}: streams need a token with the role member", hint="give it in TRIREME_TOKEN")
        if status[1:2] == [b"421"]:
            raise AnotherProcess(f"{where} is not the parameter server {meant}; read its address again")
        msg = f"{where} does not upgrade to {UPGRADE}: {head.split(bytes((13,)), 1)[0][:100]!r}"
        raise UpgradeRefused(msg)
    stream = make()
    stream.take_over(transport, rest)
    return stream


class _Handshake(asyncio.Protocol):
    """Sends one request and reads the head of its answer; then reading is paused."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._head: asyncio.Future[tuple[bytes, bytes, asyncio.Transport]] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    async def exchange(self, request: bytes) -> tuple[bytes, bytes, asyncio.Transport]:
        """The head, the bytes after it, the transport."""
        assert self._transport is not None
        self._transport.write(request)
        return await self._head

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports do not inherit from it

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, rest = bytes(self._received).partition(b"\r\n\r\n")
        if self._head.done() or self._transport is None:
            return
        if found:
            self._transport.pause_reading()
            self._head.set_result((head, rest, self._transport))
        elif len(self._received) > HEAD_BYTES:
            self._head.set_exception(PeerError(f"an answer to an upgrade of more than {HEAD_BYTES} bytes"))
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._head.done():
            why = f"{type(error).__name__}: {error}" if error is not None else "it closed the connection"
            self._head.set_exception(PeerError(f"the peer broke off before its answer to an upgrade: {why}"))

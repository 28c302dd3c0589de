"""A real etcd, through etcd3-py's raw calls to the JSON gateway. The only module that imports etcd3.

Of etcd3-py only `AioClient.call_rpc(raw=True)` is used: its models, watches, leases and locks lose events,
allow two holders, or fail with current versions of aiohttp. Sessions, TLS, log-in, time limits, endpoints and
errors are here.

    call -> endpoint in use --cannot connect--> next endpoint, at once
                            --any other failure--> error; the next call goes to the next endpoint
    stream -> messages ... quiet for QUIET_S --the endpoint answers something else--> only quiet
                                             --nothing at all--> broken
At most IN_FLIGHT requests are under way; the others wait for their turn, in order, with all of their time
still before them: a leader of a thousand jobs that counted the wait would give up requests that etcd never
saw, and send them again. What a lease depends on does not wait.
An answer with another cluster_id, or with a lower raft_term than seen before, is rejected. In the gateway's
JSON bytes are base64, int64 are decimal strings, and zero values are absent (`encode`, `decode`).
"""

from __future__ import annotations

import asyncio
import io
import json
import socket
import ssl
from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
from etcd3.aio_client import AioClient

from trireme_shared.platform.etcd.errors import (
    Fatal,
    Refused,
    Retryable,
    Unauthenticated,
    of_answer,
    unanswered,
)
from trireme_shared.platform.etcd.operations import (
    AUTHENTICATE,
    GRANT,
    KEEP_ALIVE,
    REVOKE,
    STATUS,
    TIME_TO_LIVE,
    WATCH,
    Body,
    is_write,
)
from trireme_shared.platform.etcd.shared_watches import SharedWatches
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.runtime.telemetry import without_user
from trireme_shared.protocol.errors import InvalidArgument, TriremeError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CONNECT_TIMEOUT_S = 1.0
IN_FLIGHT = 32
AT_ONCE = frozenset({GRANT, REVOKE, KEEP_ALIVE, TIME_TO_LIVE, STATUS, AUTHENTICATE})
QUIET_S = 3.0  # of a stream; then somebody asks whether the endpoint answers at all
PROBE_S = 1.0
MUTE = 3
KEEPALIVE_S = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}  # the last one is a number of tries
MAX_MESSAGE_BYTES = 64 << 20
LARGE_BODY_BYTES = 1 << 19
UNIX = "unix"  # the scheme of unix:///path/of/socket
SOCKET_BYTES = 107  # the longest path of a UNIX socket
HEADERS = {"Grpc-Metadata-Hasleader": "true", "Content-Type": "application/json"}

log = telemetry.logger("etcd.transport")


class RawClient(AioClient):  # type: ignore[misc]  # etcd3-py is untyped
    """etcd3-py's client with a session of ours, and without its constructor, which makes blocking
    requests."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        parts = urlsplit(url)
        self.protocol, self.host, self.port = parts.scheme, parts.hostname, parts.port
        if parts.scheme == UNIX:  # the session's connector knows the socket
            self.protocol, self.host, self.port = "http", "localhost", 80
        if ":" in (self.host or ""):
            self.host = f"[{self.host}]"
        self.api_prefix = "/v3"
        self.user_agent = "trireme"
        self.headers = HEADERS
        self.timeout = None
        self.token = None
        self.session = session


@dataclass(eq=False)
class _Endpoint:
    """`heard_at`: when it last sent anything; `silent`: since then it has left a probe unanswered."""

    url: str
    unary: RawClient
    streams: RawClient
    heard_at: float = 0.0
    silent: bool = False
    probing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def heard(self) -> None:
        self.heard_at, self.silent = clock.monotonic(), False


class Etcd3Transport:
    """See Transport. Opens connections at the first call; one event loop only."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        user: str = "",
        password: str = "",
        ca: str = "",
        cert: str = "",
        key: str = "",
        share_watches: bool = False,
    ) -> None:
        """`share_watches`: all over one connection."""
        self.urls = tuple(_checked(without_user(url)) for url in urls)
        if not self.urls:
            raise InvalidArgument(
                "no etcd endpoint given; set TRIREME_ETCD to http(s)://host:port[,…] or "
                "unix:///path/of/socket"
            )
        self._ssl = _ssl_context(ca, cert, key) if any(url.startswith("https") for url in self.urls) else None
        self._user, self._password = user, password
        self.token: str | None = None
        self._login = asyncio.Lock()
        self._sessions: tuple[aiohttp.ClientSession, ...] = ()
        self._endpoints: list[_Endpoint] = []
        self.current = 0
        self._cluster_id = 0
        self._raft_term = 0
        self._quiet_told = False
        self._closed = False
        self._shares = share_watches
        self._shared: SharedWatches | None = None
        self._turns = asyncio.Semaphore(IN_FLIGHT)
        self._mute = 0  # streams of shared watches in a row on which nothing came, though etcd answers

    def __repr__(self) -> str:
        return f"<Etcd3Transport {self.urls[self.current]} of {len(self.urls)}, raft term {self._raft_term}>"

    # ------------------------------------------------------------ the port

    async def call(self, method: str, body: Body, timeout_s: float) -> Body:
        if method in AT_ONCE:
            return await self._called(method, body, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self._turns.acquire()
        except TimeoutError:
            msg = (
                f"etcd {method} was not sent: the {IN_FLIGHT} requests before it took longer than "
                f"{timeout_s:.3g} s"
            )
            raise Retryable(msg) from None
        try:
            return await self._called(method, body, timeout_s)
        finally:
            self._turns.release()

    async def _called(self, method: str, body: Body, timeout_s: float) -> Body:
        write = is_write(method, body)
        where = f"etcd {method}"
        try:
            async with asyncio.timeout(timeout_s):
                await self._log_in(None)
                token = self.token
                try:
                    return await self._unary(method, body, write)
                except Unauthenticated:
                    if not self._user:
                        raise
                    await self._log_in(token)
                    return await self._unary(method, body, write)
        except TimeoutError:
            where = f"{where} at {self.urls[self.current]}"
            self._move_on(self.current)
            raise unanswered(f"{where} gave no answer within {timeout_s:.3g} s", write=write) from None

    async def stream(self, method: str, body: Body) -> AsyncGenerator[Body, None]:
        if not self._shares:
            async with aclosing(self._stream(method, encode(body))) as messages:
                async for message in messages:
                    yield message
            return
        shared = self._shared_watches()
        try:
            async with aclosing(shared.watch(body["create_request"])) as messages:
                async for message in messages:
                    yield message
        except Retryable as error:
            self._mute = self._mute + 1 if shared.never_spoke and await self._answers() else 0
            if self._shares and self._mute >= MUTE:
                self._shares = False
                log.warning("watches_have_connections_of_their_own", cause=str(error))
            raise

    def _shared_watches(self) -> SharedWatches:
        if self._shared is None or self._shared.ended:
            self._shared = SharedWatches(lambda requests: self._stream(WATCH, _encoded(requests)))
        return self._shared

    async def _answers(self) -> bool:
        try:
            await self.call(STATUS, {}, PROBE_S)
        except TriremeError:
            return False
        return True

    async def _stream(self, method: str, data: bytes | AsyncIterator[bytes]) -> AsyncGenerator[Body, None]:
        """`data` in pieces: they are sent while messages come."""
        index, endpoint = self._in_use()
        where = f"etcd {method} at {endpoint.url}"
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(QUIET_S):
                    await self._log_in(None)
                    posted = _posted(endpoint.streams, method, data, self.token)
                    response = await stack.enter_async_context(posted)
                    if response.status >= 400:
                        raise await _refusal(response, where, write=False)
                _notice_dead_peer(response)
                async for line in _lines(response, lambda: self._check_quiet(endpoint), endpoint.heard):
                    yield self._checked_answer(
                        _unwrapped(decode(line), where, write=False), where, write=False
                    )
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._move_on(index)
            raise Retryable(f"{where} broke: {type(error).__name__}: {error}") from error
        except Unauthenticated:
            self.token = None  # the watch reopens and logs in
            raise
        except TriremeError:
            self._move_on(index)
            raise

    async def close(self) -> None:
        self._closed = True
        if self._shared is not None:
            self._shared.end()
        sessions, self._sessions, self._endpoints = self._sessions, (), []
        for session in sessions:
            await session.close()
        if self._ssl is not None and sessions:
            await asyncio.sleep(0.05)  # aiohttp closes TLS connections a little after `close` returns

    # ------------------------------------------------------------ one request

    async def _unary(self, method: str, body: Body, write: bool) -> Body:
        """Ask the current endpoint; if it cannot be connected to, ask the next."""
        data = encode(body)
        failure: Exception | None = None
        down = True
        for _ in self.urls:
            index, endpoint = self._in_use()
            where = f"etcd {method} at {endpoint.url}"
            try:
                async with _posted(endpoint.unary, method, data, self.token) as response:
                    if response.status >= 400:
                        raise await _refusal(response, where, write=write)
                    document = decode(await response.read())
                    endpoint.heard()
                return self._checked_answer(_unwrapped(document, where, write=write), where, write=write)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                self._move_on(index)
                failure = error
                # a UNIX socket is gone once its etcd has ended
                down &= isinstance(
                    getattr(error, "os_error", None), ConnectionRefusedError | FileNotFoundError
                )
            except (aiohttp.ClientError, OSError, ValueError) as error:
                self._move_on(index)
                raise unanswered(
                    f"{where} broke off: {type(error).__name__}: {error}", write=write
                ) from error
            except Unauthenticated:
                raise
            except TriremeError as error:
                if error.retryable:
                    self._move_on(index)
                raise
        kind = Refused if down else Retryable
        raise kind(f"cannot connect to etcd at {', '.join(self.urls)}: {failure}") from failure

    async def _check_quiet(self, endpoint: _Endpoint) -> None:
        """A stream was quiet for QUIET_S. Raises Retryable if its endpoint sends nothing else either: one
        probe tells all streams."""
        async with endpoint.probing:
            if not endpoint.silent and clock.monotonic() - endpoint.heard_at >= QUIET_S:
                try:
                    async with (
                        asyncio.timeout(PROBE_S),
                        _posted(endpoint.unary, STATUS, b"{}", self.token) as response,
                    ):
                        await response.read()
                    endpoint.heard()
                except (aiohttp.ClientError, OSError):  # TimeoutError is one
                    endpoint.silent = True
        if endpoint.silent:
            raise Retryable(
                f"etcd at {endpoint.url} is silent: nothing for {QUIET_S:g} s, and no answer "
                f"within {PROBE_S:g} s"
            )
        if not self._quiet_told:
            self._quiet_told = True
            log.info("watches_are_quiet", etcd=endpoint.url, checked_every_s=QUIET_S)

    def _in_use(self) -> tuple[int, _Endpoint]:
        if self._closed:
            raise Fatal("the etcd client is closed")
        if not self._endpoints:
            for url in self.urls:
                unary, streams = _session(url, self._ssl), _session(url, self._ssl)
                self._sessions += (unary, streams)
                self._endpoints.append(_Endpoint(url, RawClient(url, unary), RawClient(url, streams)))
        return self.current, self._endpoints[self.current]

    def _move_on(self, failed: int) -> None:
        """Leave an endpoint that failed, unless another call did so already."""
        if self.current == failed and len(self.urls) > 1:
            self.current = (failed + 1) % len(self.urls)
            log.info("endpoint_changed", left=self.urls[failed], now=self.urls[self.current])

    def _checked_answer(self, answer: Body, where: str, *, write: bool) -> Body:
        """The answer. Raises if its sender lags behind the cluster or belongs to another cluster."""
        header = answer.get("header", {})
        cluster_id, raft_term = header.get("cluster_id", 0), header.get("raft_term", 0)
        if cluster_id:
            if self._cluster_id and cluster_id != self._cluster_id:
                msg = (
                    f"{where} belongs to cluster {cluster_id:x}, before it was {self._cluster_id:x}; "
                    "are the endpoints right, was etcd's data replaced?"
                )
                raise unanswered(msg, write=write)
            self._cluster_id = cluster_id
        if raft_term:
            if raft_term < self._raft_term:
                msg = (
                    f"{where} is at raft term {raft_term}, the cluster was seen at {self._raft_term}; "
                    "that member is cut off"
                )
                raise unanswered(msg, write=write)
            self._raft_term = raft_term
        return answer

    # ------------------------------------------------------------ log-in

    async def _log_in(self, refused: str | None) -> None:
        """Get a token if a user is given and there is no token, or only the `refused` one; concurrent calls
        share the request."""
        if not self._user or (self.token is not None and self.token != refused):
            return
        async with self._login:
            if self.token is not None and self.token != refused:
                return
            self.token = None
            answer = await self._unary(
                AUTHENTICATE, {"name": self._user, "password": self._password}, write=False
            )
            self.token = answer["token"]


@asynccontextmanager
async def _posted(
    client: RawClient, method: str, data: bytes | AsyncIterator[bytes], token: str | None
) -> AsyncIterator[aiohttp.ClientResponse]:
    headers = {"Authorization": token} if token else {}
    if not isinstance(data, bytes):
        headers["Connection"] = "close"  # see SharedWatches
    timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
    # aiohttp warns of large bodies that are bytes
    body = io.BytesIO(data) if isinstance(data, bytes) and len(data) >= LARGE_BODY_BYTES else data
    async with client.call_rpc(method, body, raw=True, headers=headers, timeout=timeout) as response:
        yield response


def _notice_dead_peer(response: aiohttp.ClientResponse) -> None:
    """A connection whose other end is gone without a word breaks within seconds, also if other connections to
    etcd work."""
    connection = response.connection
    peer = connection.transport.get_extra_info("socket") if connection and connection.transport else None
    if peer is not None and peer.family != socket.AF_UNIX:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE_S.items():
            if hasattr(socket, name):
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _encoded(requests: AsyncIterator[Body]) -> AsyncIterator[bytes]:
    async for request in requests:
        yield encode(request) + b"\n"


async def _lines(
    response: aiohttp.ClientResponse, on_quiet: Callable[[], Awaitable[None]], on_data: Callable[[], None]
) -> AsyncGenerator[bytes, None]:
    """The lines of a stream, whatever their length (up to MAX_MESSAGE_BYTES): aiohttp's own lines end at 512
    KiB."""
    buffer = bytearray()
    while True:
        try:
            async with asyncio.timeout(QUIET_S) as limit:
                chunk = await response.content.readany()
        except TimeoutError:
            if not limit.expired():  # the connection's own end, not ours
                raise
            await on_quiet()
            continue
        if not chunk:
            break
        on_data()
        searched = len(buffer)
        buffer += chunk
        while (end := buffer.find(b"\n", searched)) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            searched = 0
            if line.strip():
                yield line
        if len(buffer) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of etcd is longer than {MAX_MESSAGE_BYTES} bytes")
    if buffer.strip():
        yield bytes(buffer)


async def _refusal(response: aiohttp.ClientResponse, where: str, *, write: bool) -> TriremeError:
    text = await response.content.read(1 << 16)
    document: Any = text.decode("utf-8", "replace")
    with suppress(ValueError):
        document = json.loads(text)
    return of_answer(document, response.status, where=where, write=write)


def _unwrapped(document: Any, where: str, *, write: bool) -> Body:
    """A stream's messages come as {"result": …} or {"error": …}, also where the stream is a single answer."""
    if not isinstance(document, dict) or "error" in document:
        raise of_answer(document, 200, where=where, write=write)
    result = document.get("result", document)
    assert isinstance(result, dict)
    return result


def _session(url: str, context: ssl.SSLContext | None) -> aiohttp.ClientSession:
    connector: aiohttp.BaseConnector
    if urlsplit(url).scheme == UNIX:
        connector = aiohttp.UnixConnector(urlsplit(url).path, limit=0)
    else:
        connector = aiohttp.TCPConnector(limit=0, ssl=context if context is not None else True)
    return aiohttp.ClientSession(connector=connector, auto_decompress=False)


def _ssl_context(ca: str, cert: str, key: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca or None)
        if cert:
            context.load_cert_chain(cert, key or None)
    except OSError as error:  # ssl.SSLError is one
        msg = (
            f"cannot use the certificates for etcd (ca {ca!r}, cert {cert!r}, key {key!r}): {error}; "
            "give PEM files"
        )
        raise InvalidArgument(msg) from error
    return context


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme == UNIX:
        return _checked_socket(url, parts.netloc, parts.path)
    try:
        port = parts.port
    except ValueError:
        port = None
    if (
        parts.scheme not in {"http", "https"}
        or not parts.hostname
        or port is None
        or parts.path not in {"", "/"}
    ):
        raise InvalidArgument(
            f"{url!r} is not an etcd endpoint; write it as http://host:2379, https://host:2379 or "
            "unix:///path/of/socket"
        )
    return url.rstrip("/")


def _checked_socket(url: str, host: str, path: str) -> str:
    if host or not path.startswith("/") or path.endswith("/"):
        raise InvalidArgument(
            f"{url!r} is not the UNIX socket of an etcd; write it as unix:///path/of/socket"
        )
    if len(path.encode()) > SOCKET_BYTES:
        raise InvalidArgument(
            f"{url!r}: the path of a UNIX socket may have {SOCKET_BYTES} bytes; use a shorter one"
        )
    return url


_BYTES = frozenset({"key", "value", "range_end"})
_INTEGERS = frozenset(
    {
        "revision",
        "create_revision",
        "mod_revision",
        "version",
        "lease",
        "ID",
        "TTL",
        "grantedTTL",
        "count",
        "deleted",
        "compact_revision",
        "raft_term",
        "cluster_id",
        "member_id",
        "watch_id",
        "dbSize",
        "dbSizeInUse",
        "leader",
        "raftIndex",
        "raftTerm",
    }
)


def encode(body: Body) -> bytes:
    """Integers may be JSON numbers on the way in: the gateway reads all 64 bits."""
    return json.dumps(body, default=_base64, separators=(",", ":")).encode()


def _base64(value: Any) -> str:
    if isinstance(value, bytes):
        return b64encode(value).decode("ascii")
    msg = f"{type(value).__name__} cannot be sent to etcd"
    raise TypeError(msg)


def decode(text: bytes) -> Any:
    """A JSON document in native form. Raises ValueError for invalid JSON or invalid base64."""
    return _native(json.loads(text))


def _native(value: Any) -> Any:
    if isinstance(value, dict):
        for name, item in value.items():
            if isinstance(item, str):
                if name in _BYTES:
                    value[name] = b64decode(item, validate=True)
                elif name in _INTEGERS and item.lstrip("-").isdigit():
                    value[name] = int(item)
            elif isinstance(item, dict | list):
                _native(item)
    elif isinstance(value, list):
        for item in value:
            _native(item)
    return value

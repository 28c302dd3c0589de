"""The port of a member, over TLS or in clear text, and the limits of connections for which no token has been
shown yet.

accept ──► TlsServer: handshake in time? ──► Arrivals: a request with a good token in time?
    ──► the server's own limits hold
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.security.access import family_of
from trireme_shared.protocol.errors import CallerError

if TYPE_CHECKING:
    from aiohttp import web

HANDSHAKE_S = 5.0
SHUTDOWN_S = 2.0  # how long a peer may take to say that it has heard of the end
BUSY_S = 0.1  # no file is left for another connection: time for some to end
REPORT_S = 1.0

tls_log = telemetry.logger("tls")


class TlsServer:
    """Accepts connections over TLS: handshakes have a time limit, and count among the connections of their
    peer.

    accept ──► handshake, at most HANDSHAKE_S ──► the server's protocol, which has limits of its own
                 └── not over in time, or the peer has `per_peer` connections: cut

    `loop.create_server(ssl=...)` waits 60 s for each handshake, and tells the server nothing of it: a peer
    that sends nothing could hold all files that the process may open.

    Serves `listener` until it is closed; then handshakes that are not over are cut. `make`: the protocol of a
    connection. `held`: how many connections of a peer the server counts otherwise, of at most `per_peer`.
    """

    def __init__(
        self,
        listener: socket.socket,
        tls: ssl.SSLContext,
        make: Callable[[], asyncio.BaseProtocol],
        *,
        per_peer: int,
        held: Callable[[str], int],
    ) -> None:
        listener.setblocking(False)
        self._listener, self._tls, self._make = listener, tls, make
        self._per_peer, self._held = per_peer, held
        self._by_peer: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._cut: Counter[tuple[str, str]] = Counter()
        self._accepting = asyncio.ensure_future(self._accept())

    def close(self) -> None:
        for task in (self._accepting, *self._tasks):
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.wait([self._accepting, *self._tasks])
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(self._listener)
            except OSError as error:
                tls_log.warning("connection_not_accepted", cause=str(error))
                await asyncio.sleep(BUSY_S)
                continue
            peer = str(address[0])
            if self._by_peer[peer] + self._held(peer) >= self._per_peer:
                accepted.close()
                self._report(peer, f"it has {self._per_peer} connections already")
                continue
            self._by_peer[peer] += 1
            task = asyncio.ensure_future(self._shake_hands(accepted, peer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(0)  # who connects without end must not stop everything else

    async def _shake_hands(self, accepted: socket.socket, peer: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                self._make,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except OSError as error:  # ssl.SSLError and a handshake that takes too long are one
            self._report(peer, str(error))
        finally:
            self._by_peer[peer] -= 1
            if not self._by_peer[peer]:
                del self._by_peer[peer]

    def _report(self, peer: str, cause: str) -> None:
        """At most once in REPORT_S: strangers must not fill the log."""
        if not self._cut:
            asyncio.get_running_loop().call_later(REPORT_S, self._tell)
        if (peer, cause) in self._cut or len(self._cut) < 16:
            self._cut[peer, cause] += 1

    def _tell(self) -> None:
        for (peer, cause), count in self._cut.items():
            tls_log.warning("handshakes_failed", peer=peer, count=count, cause=cause)
        self._cut.clear()


LOOK_S = 1.0

log = telemetry.logger("connections")


@dataclass(eq=False, repr=False)
class Arrivals:
    """Cuts connections of one server that nobody vouches for, after a while; and each peer may have few of
    them.

    connect ──► waits ──a request with a good token──► admitted: its own time limits hold
                  |                                    (data_plane/http.py, stream.py)
                  └── `patience_s` over, or more than `per_peer` of its address: cut

    Idle connections and half requests cost a file and some KiB each; a peer without a token must not be able
    to hold them for long. `admit` names a connection whose request had a good token.
    """

    patience_s: float = 10.0
    per_peer: int = 256
    _since: dict[asyncio.Transport, float] = field(default_factory=dict)
    _admitted: set[asyncio.Transport] = field(default_factory=set)
    _held: Counter[str] = field(default_factory=Counter)

    def __repr__(self) -> str:
        return f"<Arrivals: {len(self._since)} not admitted yet, {len(self._admitted)} admitted>"

    @property
    def waiting(self) -> int:
        """Connections that were not admitted when it last looked, and are open."""
        return sum(not each.is_closing() for each in self._since)

    def held(self, peer: str) -> int:
        """How many of them `peer` had when it last looked."""
        return self._held[peer]

    def admit(self, transport: asyncio.Transport | None) -> None:
        if transport is not None:
            self._admitted.add(transport)

    async def run(self, server: web.Server) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look([handler.transport for handler in server.connections if handler.transport is not None])

    def look(self, open_now: Iterable[asyncio.Transport]) -> None:
        """Cut what has waited too long, and what a peer has too many of, the youngest first."""
        now, found = clock.monotonic(), set(open_now)
        self._admitted &= found
        self._since = {each: self._since.get(each, now) for each in found - self._admitted}
        held = self._held = Counter()
        cut: Counter[str] = Counter()
        for transport, since in sorted(self._since.items(), key=lambda item: item[1]):
            address = transport.get_extra_info("peername")
            peer = str(address[0]) if isinstance(address, tuple) else "the UNIX socket"
            held[peer] += 1
            if held[peer] > self.per_peer or now - since >= self.patience_s:
                transport.abort()
                cut[peer] += 1
        for peer, count in cut.items():
            log.warning(
                "connections_cut", peer=peer, count=count, cause="no request with a good token came on them"
            )


@asynccontextmanager
async def listening(
    runner: web.AppRunner, arrivals: Arrivals, host: str, port: int, tls: ssl.SSLContext | None
) -> AsyncIterator[int]:
    """The port, until the `with` block ends; then `runner` is cleaned up, with all sites that it has by then.
    `port` 0: a free one. Raises CallerError if the port is taken."""
    from aiohttp import web  # noqa: PLC0415  a master serves by uvicorn

    await runner.setup()
    assert runner.server is not None
    over_tls = None
    try:
        listener = _bind(host, port)
        if tls is None:
            await web.SockSite(runner, listener).start()
        else:
            over_tls = TlsServer(listener, tls, runner.server, per_peer=arrivals.per_peer, held=arrivals.held)
        looking = asyncio.ensure_future(arrivals.run(runner.server))
        try:
            yield listener.getsockname()[1]
        finally:
            looking.cancel()
            await asyncio.wait([looking])
    finally:
        if over_tls is not None:
            over_tls.close()
            await over_tls.wait_closed()
        await runner.cleanup()


def _bind(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=family_of(host), backlog=128)
    except OSError as error:
        msg = (
            f"cannot listen on {host} port {port}: {error.strerror}; choose another TRIREME_HOST or "
            "TRIREME_PORT"
        )
        raise CallerError(msg) from error

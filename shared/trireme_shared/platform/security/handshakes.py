"""Accepts connections over TLS: handshakes have a time limit, and count among the connections of their peer.

accept ──► handshake, at most HANDSHAKE_S ──► the server's protocol, which has limits of its own
             └── not over in time, or the peer has `per_peer` connections: cut

`loop.create_server(ssl=...)` waits 60 s for each handshake, and tells the server nothing of it: a peer that sends nothing could
hold all files that the process may open.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Callable

from trireme_shared.platform.runtime import telemetry

HANDSHAKE_S = 5.0
SHUTDOWN_S = 2.0  # how long a peer may take to say that it has heard of the end
BUSY_S = 0.1  # no file is left for another connection: time for some to end
REPORT_S = 1.0

log = telemetry.logger("tls")


class TlsServer:
    """Serves `listener` until it is closed; then handshakes that are not over are cut. `make`: the protocol of a connection.
    `held`: how many connections of a peer the server counts otherwise, of at most `per_peer`."""

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
                log.warning("connection_not_accepted", cause=str(error))
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
            log.warning("handshakes_failed", peer=peer, count=count, cause=cause)
        self._cut.clear()

"""The floor under exchanges over TCP: one member of a mesh of plain sockets that carry as many bytes as a
direct exchange, with nothing computed.

to each other member   its share of the gradient, then as much again (the own share's mean); one blocking
                       thread for each direction
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence

from benchmarks.baselines import HANG_S

BUFFER_BYTES, CHUNK_BYTES = 1 << 20, 1 << 20  # the fastest of 256 KiB to 4 MiB here
TRIPS = 2


class FloorMember:
    def __init__(self, place: int, members: int) -> None:
        self._place, self._members = place, members
        self._listener = _tuned(socket.socket())
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()

    def serve(self) -> int:
        """The port."""
        return self._listener.getsockname()[1]

    def begin(self, mib: int, ports: Sequence[int]) -> None:
        size = TRIPS * (mib << 20) // self._members
        self._peers = []
        for port in ports[: self._place]:
            peer = _tuned(socket.socket())
            peer.connect(("127.0.0.1", port))
            self._peers.append(peer)
        self._peers += [self._listener.accept()[0] for _ in range(self._place + 1, self._members)]
        self._memory = [(bytearray(b"\1") * size, bytearray(size)) for _ in self._peers]  # pages of its own
        for peer in self._peers:
            peer.settimeout(HANG_S)

    def round(self, at: float) -> float:
        """Begins at `at`; when all has come, both of time.monotonic."""
        works: list[Callable[[], None]] = []
        for peer, (out, into) in zip(self._peers, self._memory, strict=True):
            works += [_sending(peer, out), _receiving(peer, into)]
        threads = [threading.Thread(target=work) for work in works]
        time.sleep(max(0.0, at - time.monotonic()))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.monotonic()

    def check(self) -> int:
        return 0


def _sending(peer: socket.socket, memory: bytearray) -> Callable[[], None]:
    def send() -> None:
        view = memoryview(memory)
        for first in range(0, len(view), CHUNK_BYTES):
            peer.sendall(view[first : first + CHUNK_BYTES])

    return send


def _receiving(peer: socket.socket, memory: bytearray) -> Callable[[], None]:
    def receive() -> None:
        view = memoryview(memory)
        while view:
            count = peer.recv_into(view[:CHUNK_BYTES])
            if not count:
                raise ConnectionError("the other member has gone")
            view = view[count:]

    return receive


def _tuned(plain: socket.socket) -> socket.socket:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        plain.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    return plain

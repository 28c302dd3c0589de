"""The sockets of a native group, which torch does not show: found by their addresses, cut by shutting them down.

A group's operation that waits for a dead or frozen peer ends only by its timeout, or when its sockets break. The listening socket is
never touched: Gloo ends the process when that fails.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress

Address = tuple[str, int]
FOLDER = "/dev/fd"


def listening() -> set[Address]:
    """Where this process accepts TCP connections."""
    return {own for taken, own, peer in _sockets() if peer is None and _accepts(taken)}


def cut(own: Address | None, peers: Collection[Address]) -> int:
    """Shut down the connections that came in at `own` or go to one of `peers`. Answers how many."""
    count = 0
    for taken, local, peer in _sockets():
        if peer is None or _accepts(taken) or not (local == own or peer in peers):
            continue
        with suppress(OSError):
            taken.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def connections(own: Address | None, peers: Collection[Address]) -> int:
    """How many of them there are."""
    return sum(peer is not None and (local == own or peer in peers) for _, local, peer in _sockets())


def _sockets() -> Iterator[tuple[socket.socket, Address, Address | None]]:
    """(socket, own address, the peer's or None) of each TCP socket. It is a duplicate, made before its address was read: a number that
    is used for another socket meanwhile does no harm."""
    for name in os.listdir(FOLDER):  # noqa: PTH208  it changes while it is read
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            taken = socket.socket(fileno=os.dup(int(name)))
        except (OSError, ValueError):
            continue
        with taken:
            if taken.family not in (socket.AF_INET, socket.AF_INET6) or taken.type != socket.SOCK_STREAM:
                continue
            try:
                own = taken.getsockname()[:2]
            except OSError:
                continue
            try:
                peer = taken.getpeername()[:2]
            except OSError:
                peer = None
            yield taken, own, peer


def _accepts(taken: socket.socket) -> bool:
    try:
        return bool(taken.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False

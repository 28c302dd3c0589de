"""Cuts connections of this process, as a network does."""

from __future__ import annotations

import os
import socket


def cut_all(*, unix: str = "") -> None:
    """Every TCP connection, and those of UNIX sockets at whose one end is a name with `unix` in it. etcd's is
    another one."""
    for name in os.listdir("/dev/fd"):  # noqa: PTH208
        try:
            taken = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with taken:
            try:
                ends = f"{taken.getpeername()} {taken.getsockname()}"
                if taken.family == socket.AF_INET or (
                    unix and taken.family == socket.AF_UNIX and unix in ends
                ):
                    taken.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

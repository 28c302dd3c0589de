"""Which network a process is in. Loopback addresses mean another process in every network: a refused connection tells nothing about
a process elsewhere."""

from __future__ import annotations

import ipaddress
import socket
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")


@cache
def own_network() -> str:
    """The same text in every process that shares this one's loopback addresses: of one machine, and there of one container."""
    try:
        return f"{BOOT_ID.read_text().strip()}/{NETWORK.stat().st_ino}"
    except OSError:  # not Linux: no containers that share a name
        return socket.gethostname()


def tells(url: str, theirs: str, mine: str) -> bool:
    """Whether a connection to `url` that is refused to a process in the network `mine` proves that nothing listens there for the
    process in `theirs` that gave the url."""
    return theirs == mine or not _is_local(urlsplit(url).hostname or "")


def is_here(theirs: str) -> bool:
    """Whether a process in the network `theirs` is on this host, as far as is known (""): then its pid and its UNIX sockets mean the
    same here. Another host may have the same name and the same files."""
    return theirs in ("", own_network())


def _is_local(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified

"""The users of an etcd: which calls turn them on, and which make one that may use Trireme's keys alone.

    users(password)  ── as nobody ──►  users are on, `root` may do everything
    member(...)      ── as root ────►  a user that reads and writes /<root>/ and nothing else

Each call may be made again: what was done already is refused by etcd, and that is ignored.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, TypeAlias

from trireme_shared.protocol.errors import CallerError

Calls: TypeAlias = "tuple[tuple[str, dict[str, Any]], ...]"

ROOT = "root"  # etcd turns users on only if there is this one


def users(password: str) -> Calls:
    """Turn users on, with `password` for ROOT, who may do everything."""
    return (
        ("/auth/role/add", {"name": ROOT}),
        ("/auth/user/add", {"name": ROOT, "password": password}),
        ("/auth/user/grant", {"user": ROOT, "role": ROOT}),
        ("/auth/enable", {}),
    )


def member(name: str, password: str, prefix: str) -> Calls:
    """A user that may read and write the keys below `prefix`. One that is there gets this password."""
    return (
        ("/auth/role/add", {"name": name}),
        ("/auth/role/grant", {"name": name, "perm": _below(prefix)}),
        ("/auth/user/add", {"name": name, "password": password}),
        ("/auth/user/changepw", {"name": name, "password": password}),
        ("/auth/user/grant", {"user": name, "role": name}),
    )


def nobody(name: str, password: str) -> Calls:
    """A user that may log in and read no key: enough to ask whether etcd answers."""
    return (("/auth/user/add", {"name": name, "password": password}),)


async def make(
    call: Callable[[str, dict[str, Any]], Awaitable[object]], calls: Iterable[tuple[str, dict[str, Any]]]
) -> None:
    """What was done already is left out. Whoever needs to know that all is done logs in afterwards. Raises
    PeerError: etcd does not answer."""
    for method, body in calls:
        with suppress(CallerError):
            await call(method, body)


def _below(prefix: str) -> dict[str, Any]:
    first = prefix.encode()
    return {"permType": "READWRITE", "key": first, "range_end": first[:-1] + bytes([first[-1] + 1])}

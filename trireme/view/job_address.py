"""Whoever answers questions about a job, by its address: a master's REST, or a masterless job in etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from shared.errors import InvalidArgument
from trireme.view.client import MASTERLESS, TIMEOUT_S, Client

if TYPE_CHECKING:
    from trireme.view.spectator import Spectator


def address(etcd_url: str, job: str) -> str:
    """How a masterless job is named where others have their master's address: `etcd+http://127.0.0.1:2379/digits`."""
    return f"{MASTERLESS}{etcd_url.rstrip('/')}/{job}"


@asynccontextmanager
async def reach(url: str, *, token: str = "", timeout_s: float = TIMEOUT_S) -> AsyncIterator[Client | Spectator]:
    """Raises PeerError, DeadlineExceeded if nothing answers."""
    if not url.startswith(MASTERLESS):
        async with Client(url, token=token, timeout_s=timeout_s) as client:
            yield client
        return
    endpoint, _, job = url.removeprefix(MASTERLESS).rpartition("/")
    if "//" not in endpoint or not job:
        raise InvalidArgument(f"{url} names no masterless job; write etcd+http://HOST:PORT/JOB")
    from shared.etcd import connect  # noqa: PLC0415  questions to a master are answered without loading half of one
    from shared.keys import Keys  # noqa: PLC0415
    from trireme.view.spectator import Spectator  # noqa: PLC0415

    etcd = connect([endpoint])
    spectator = Spectator(etcd, Keys(job))
    following = asyncio.ensure_future(spectator.run())
    try:
        await spectator.ready(timeout_s)
        yield spectator
    finally:
        following.cancel()
        await asyncio.wait([following])
        await etcd.close()

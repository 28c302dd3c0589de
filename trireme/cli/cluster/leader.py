"""Commands that wait for a cluster's leader: right after `trireme up`, and while another master takes over."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from trireme.cli.targets import cluster_target
from trireme.client import AsyncClient
from trireme.view.job_address import client_of
from trireme.view.progress import say
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import DeadlineExceeded, NotLeader, NotReady, PeerError

LEADER_S = 60.0
PAUSE_S = 0.3

A = TypeVar("A")


async def ask_leader(
    ask: Callable[[AsyncClient], Awaitable[A]], data_dir: Path | None, url: str | None, limit_s: float = LEADER_S
) -> A:
    """What `ask` answers. While no master leads, it is asked again, so it must do no harm when repeated. Raises DeadlineExceeded if
    that lasts for `limit_s`; NotFound: no cluster runs here; PeerError: nothing answers at a URL that was given; what `ask` raises."""
    deadline, told = clock.monotonic() + limit_s, False
    given = bool(url or os.environ.get("TRIREME_URL"))
    while True:
        try:
            target = cluster_target(data_dir, url)
            async with client_of(target.address, target.token) as cluster:
                return await ask(cluster)
        except PeerError as error:
            if not _passes(error, given=given):
                raise
            if clock.monotonic() > deadline:
                msg = f"waited {limit_s:g} s for a master to lead the cluster: {error.message}"
                raise DeadlineExceeded(msg, hint="`trireme up` shows whether it runs; its logs say more") from error
            if not told:
                say(f"waiting up to {limit_s:g} s for a master to lead the cluster: {error.message}")
            told = True
        await asyncio.sleep(PAUSE_S)


def _passes(error: PeerError, *, given: bool) -> bool:
    """Whether the next leader will do better. The cluster of a folder is known to run; a URL may be wrong."""
    return isinstance(error, NotLeader | NotReady) or (not given and type(error) in (PeerError, DeadlineExceeded))

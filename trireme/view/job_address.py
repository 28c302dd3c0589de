"""A client for a job's address: a master's URL, that of a job in a cluster (`http://HOST:PORT/v1/jobs/NAME`), or
`etcd+http://HOST:PORT/JOB` or `etcd+unix:///SOCKET/JOB` for a job without a master."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, TypeAlias

from trireme.client import ONLY_JOB, AsyncClient
from trireme.client.exchange import MASTERLESS
from trireme_shared.platform.runtime.telemetry import without_user
from trireme_shared.protocol.errors import InvalidArgument

if TYPE_CHECKING:
    from trireme.view.masterless_client import MasterlessClient

JOBS = "/v1/jobs/"
TIMEOUT_S = 10.0

AnyClient: TypeAlias = "AsyncClient | MasterlessClient"
OpenJob: TypeAlias = "tuple[AnyClient, str]"  # a client, and the job's name in its calls
Connect: TypeAlias = "Callable[[], AbstractAsyncContextManager[OpenJob]]"


def address_of(url: str, job: str | None) -> str:
    """The address of one job of the cluster or the master at `url`; None: of the only job there."""
    if url.startswith(MASTERLESS):
        return without_user(url)
    return f"{url.rstrip('/')}{JOBS}{job}" if job and JOBS not in url else url


def masterless_address(etcd_url: str, job: str) -> str:
    """The address of a masterless job: `etcd+http://127.0.0.1:2379/digits`."""
    return f"{MASTERLESS}{etcd_url.rstrip('/')}/{job}"


def client_of(url: str, token: str = "", timeout_s: float = TIMEOUT_S) -> AsyncClient:
    """A client of the master at `url`. It raises an error at once if nobody leads there, because a command looks up the next leader's
    address itself; of several addresses (with commas) it asks the one that leads."""
    masters = url.partition(JOBS)[0]
    return AsyncClient(masters, token=token, timeout_s=timeout_s, wait_for_leader="," in masters)


@asynccontextmanager
async def open_job(address: str, *, token: str = "", timeout_s: float = TIMEOUT_S) -> AsyncIterator[OpenJob]:
    """Raises PeerError, DeadlineExceeded if nothing answers."""
    if not address.startswith(MASTERLESS):
        async with client_of(address, token, timeout_s) as client:
            yield client, address.rstrip("/").partition(JOBS)[2] or ONLY_JOB
        return
    endpoint, _, job = address.removeprefix(MASTERLESS).rpartition("/")
    if "//" not in endpoint or not job:
        raise InvalidArgument(f"{without_user(address)} names no masterless job; write etcd+http://HOST:PORT/JOB")
    from trireme.view.masterless_client import MasterlessClient  # noqa: PLC0415
    from trireme_shared.platform.membership.etcd_access import split  # noqa: PLC0415
    from trireme_shared.platform.membership.settings import MemberSettings  # noqa: PLC0415
    from trireme_shared.protocol.keys import Keys  # noqa: PLC0415  not loaded for a job with a master

    etcd = MemberSettings(job=job, etcd=split(endpoint)).connect()  # the user, say, is that of the environment
    masterless = MasterlessClient(etcd, Keys(job))
    following = asyncio.ensure_future(masterless.run())
    try:
        await masterless.ready(timeout_s)
        yield masterless, job
    finally:
        following.cancel()
        await asyncio.wait([following])
        await etcd.close()

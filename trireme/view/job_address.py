"""A client for a job's address: a master's URL, that of a job in a cluster (`http://HOST:PORT/v1/jobs/NAME`), or
`etcd+http://HOST:PORT/JOB` or `etcd+unix:///SOCKET/JOB` for a job without a master."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from shared.errors import InvalidArgument
from shared.security.hidden import without_user
from trireme.view.client import JOBS, MASTERLESS, TIMEOUT_S, Client

if TYPE_CHECKING:
    from trireme.view.masterless_client import MasterlessClient

AnyClient: TypeAlias = "Client | MasterlessClient"
Connect: TypeAlias = "Callable[[], AbstractAsyncContextManager[AnyClient]]"


def address_of(url: str, job: str | None) -> str:
    """Of one job of the cluster or the master at `url`; None: of the only one."""
    if url.startswith(MASTERLESS):
        return without_user(url)
    return f"{url.rstrip('/')}{JOBS}{job}" if job and JOBS not in url else url


def given_token() -> str:
    """TRIREME_TOKEN, else the content of the file TRIREME_TOKEN_FILE, else "". Raises InvalidArgument if that cannot be read."""
    path = os.environ.get("TRIREME_TOKEN_FILE", "")
    if (token := os.environ.get("TRIREME_TOKEN", "")) or not path:
        return token
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        msg = f"the token file {path} (TRIREME_TOKEN_FILE) cannot be read: {error}"
        raise InvalidArgument(msg) from error


def masterless_address(etcd_url: str, job: str) -> str:
    """The address of a masterless job: `etcd+http://127.0.0.1:2379/digits`."""
    return f"{MASTERLESS}{etcd_url.rstrip('/')}/{job}"


@asynccontextmanager
async def open_client(address: str, *, token: str = "", timeout_s: float = TIMEOUT_S) -> AsyncIterator[AnyClient]:
    """Raises PeerError, DeadlineExceeded if nothing answers."""
    if not address.startswith(MASTERLESS):
        async with Client(address, token=token, timeout_s=timeout_s) as client:
            yield client
        return
    endpoint, _, job = address.removeprefix(MASTERLESS).rpartition("/")
    if "//" not in endpoint or not job:
        raise InvalidArgument(f"{without_user(address)} names no masterless job; write etcd+http://HOST:PORT/JOB")
    from shared.keys import Keys  # noqa: PLC0415  not loaded for a job with a master
    from shared.membership.etcd_access import split  # noqa: PLC0415
    from shared.membership.settings import MemberSettings  # noqa: PLC0415
    from trireme.view.masterless_client import MasterlessClient  # noqa: PLC0415

    etcd = MemberSettings(job=job, etcd=split(endpoint)).connect()  # the user, say, is that of the environment
    masterless = MasterlessClient(etcd, Keys(job))
    following = asyncio.ensure_future(masterless.run())
    try:
        await masterless.ready(timeout_s)
        yield masterless
    finally:
        following.cancel()
        await asyncio.wait([following])
        await etcd.close()

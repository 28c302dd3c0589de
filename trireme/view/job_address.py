"""A client for a job's address: a master's URL, that of a job in a cluster (`http://HOST:PORT/v1/jobs/NAME`),
or `etcd+http://HOST:PORT/JOB` or `etcd+unix:///SOCKET/JOB` for a job without a master. Commands call through
it whichever master leads, and wait for operations (a checkpoint, a restore), also while one master takes over
from another.

RUNNING --long polls--> DONE: the operation
FAILED: its error
still RUNNING at the end: DeadlineExceeded
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from trireme.client import ONLY_JOB, AsyncClient
from trireme.client.exchange import MASTERLESS
from trireme_shared.platform.runtime import clock, ids
from trireme_shared.platform.runtime.telemetry import without_user
from trireme_shared.protocol.errors import DeadlineExceeded, InvalidArgument, PeerError, from_map
from trireme_shared.protocol.records.operations import Operation, OperationState

if TYPE_CHECKING:
    from trireme.view.masterless_client import MasterlessClient


JOBS = "/v1/jobs/"
TIMEOUT_S = 10.0
LONG_POLL_S = 5.0
PAUSE_S = 0.5
AWAY_S = 30.0  # how long a job may be without a master

AnyClient: TypeAlias = "AsyncClient | MasterlessClient"
OpenJob: TypeAlias = "tuple[AnyClient, str]"  # a client, and the job's name in its calls
Connect: TypeAlias = "Callable[[], AbstractAsyncContextManager[OpenJob]]"
R = TypeVar("R")


def address_of(url: str, job: str | None) -> str:
    """The address of one job of the cluster or the master at `url`; None: of the only job there."""
    if url.startswith(MASTERLESS):
        return without_user(url)
    return f"{url.rstrip('/')}{JOBS}{job}" if job and JOBS not in url else url


def masterless_address(etcd_url: str, job: str) -> str:
    """The address of a masterless job: `etcd+http://127.0.0.1:2379/digits`."""
    return f"{MASTERLESS}{etcd_url.rstrip('/')}/{job}"


def client_of(url: str, token: str = "", timeout_s: float = TIMEOUT_S) -> AsyncClient:
    """A client of the master at `url`. It raises an error at once if nobody leads there, because a command
    looks up the next leader's address itself; of several addresses (with commas) it asks the one that
    leads."""
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
        raise InvalidArgument(
            f"{without_user(address)} names no masterless job; write etcd+http://HOST:PORT/JOB"
        )
    from trireme.view.masterless_client import MasterlessClient  # noqa: PLC0415
    from trireme_shared.platform.membership.etcd_access import split  # noqa: PLC0415
    from trireme_shared.platform.membership.settings import MemberSettings  # noqa: PLC0415
    from trireme_shared.protocol.keys import Keys  # noqa: PLC0415  not loaded for a job with a master

    # the user, say, is that of the environment
    etcd = MemberSettings(job=job, etcd=split(endpoint)).connect()
    masterless = MasterlessClient(etcd, Keys(job))
    following = asyncio.ensure_future(masterless.run())
    try:
        await masterless.ready(timeout_s)
        yield masterless, job
    finally:
        following.cancel()
        await asyncio.wait([following])
        await etcd.close()


async def wait_for_operation(
    connect: Connect, operation: Operation, wait_s: float, report: Callable[[str], None]
) -> Operation:
    """The operation once it is DONE; `report` gets what it waits for. Raises the operation's error if it
    FAILED, and DeadlineExceeded if it is still RUNNING after `wait_s`; then it goes on."""
    deadline, reported = clock.monotonic() + wait_s, ""
    name = operation.operation_id
    while operation.running:
        if operation.reason != reported:
            reported = operation.reason
            report(reported)
        left = deadline - clock.monotonic()
        if left <= 0:
            msg = f"operation {name} is still running after {wait_s:g} s: {reported}"
            raise DeadlineExceeded(msg, hint="it goes on; wait longer with --wait-s", operation=name)
        operation = await _polled(connect, name, min(left, LONG_POLL_S))
    if operation.state is OperationState.FAILED:
        details = operation.model_dump(mode="json")
        raise from_map({"code": operation.error_code, "message": operation.reason, "details": details})
    report(operation.reason)
    return operation


async def _polled(connect: Connect, operation_id: str, wait_s: float) -> Operation:
    return await call_any_master(
        connect, lambda client, job: client.get_operation(job, operation_id, wait_s=wait_s)
    )


async def call_any_master(connect: Connect, call: Callable[[AnyClient, str], Awaitable[R]]) -> R:
    """Call whichever master leads; repeat while none answers. Raises PeerError after AWAY_S."""
    deadline = clock.monotonic() + AWAY_S
    while True:
        try:
            async with connect() as (client, job):
                return await call(client, job)
        except PeerError:
            if clock.monotonic() > deadline:
                raise
        await asyncio.sleep(ids.jitter(PAUSE_S))

"""What every route needs: the master, its state as etcd has it, and the parameters of pages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

from fastapi import Depends, Path, Query, Request
from starlette.types import Receive

from master_service.api.pages import TOKEN_PATTERN
from master_service.cluster.leader import JobsLed
from master_service.leadership.master import Master
from trireme_shared.protocol.errors import DeadlineExceeded, PeerError

ANSWER_S = 8.0

T = TypeVar("T")


async def _jobs(request: Request) -> JobsLed:  # not a plain function: those run in a thread each
    jobs: JobsLed = request.app.state.jobs
    return jobs


JobsOf = Annotated[JobsLed, Depends(_jobs)]


async def _master(request: Request, jobs: JobsOf) -> Master:
    return jobs.find(request.path_params.get("job"))


JobName = Annotated[str, Path(max_length=200, description="name of the job")]


async def job_in_path(job: JobName) -> str:
    """Documents the parameter of every path below /v1/jobs/{job}."""
    return job


def asked_by(request: Request) -> str:
    """For people."""
    return f"asked by {request.client.host if request.client else 'REST'}"


async def answered(call: Awaitable[T], longer_s: float = 0.0) -> T:
    """Raises DeadlineExceeded if etcd does not answer for too long. The same request, sent again, finds its result."""
    try:
        async with asyncio.timeout(ANSWER_S + longer_s):
            return await call
    except TimeoutError as error:
        msg = f"the master got no answer from etcd within {ANSWER_S:g} s; ask again"
        raise DeadlineExceeded(msg) from error


async def unless_gone(call: Awaitable[T], receive: Receive) -> T:
    """For requests that may wait: `call` is cancelled when the caller closes the connection, so that no task is given to nobody. Call it
    when the body was received. Raises PeerError then."""
    calling, leaving = asyncio.ensure_future(call), asyncio.ensure_future(receive())
    try:
        await asyncio.wait({calling, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not calling.done():
            raise PeerError("the caller has closed the connection")
        return calling.result()
    finally:
        calling.cancel()
        leaving.cancel()
        await asyncio.wait({calling, leaving})


async def committed(master: Master, view: Callable[[], T]) -> T:
    """What `view` shows now, once etcd has all of it: another master would show it, too. Raises what `view` raises; NotLeader if
    the term ends before; DeadlineExceeded."""
    writer = master.term.writer
    shown = view()
    await answered(writer.settled())
    return shown


MasterOf = Annotated[Master, Depends(_master)]
WaitS = Annotated[float, Query(ge=0, le=30, description="wait at most so many seconds for the end")]
PageSize = Annotated[int, Query(ge=1, le=1000, description="at most so many items")]
PageToken = Annotated[str, Query(pattern=TOKEN_PATTERN, description="next_page_token of the page before")]

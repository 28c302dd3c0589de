"""What the members of a job wrote, dead ones included. Who follows a log by its cursor misses no line and sees none twice."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Request, Response

from master_service.api.logs.source import ELSEWHERE, LogSource, shown
from master_service.api.resources import LogLine, LogLines, LogPage
from master_service.api.routes.dependencies import JobsOf, PageSize, PageToken
from master_service.api.server_sent import Messages, ServerSent
from master_service.cluster.leader import ClusterMaster, JobsLed
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.runtime.log_files import Line, LogFile
from trireme_shared.protocol.errors import Conflict, InvalidArgument, NotFound, NotReady

router = APIRouter(tags=["logs"])
LOOK_S = 0.5  # how often a file is looked at while somebody waits

LogName = Annotated[str, Path(max_length=300)]
After = Annotated[
    int | None, Query(ge=0, le=2**62, description="next_after of the answer before; 0: from the beginning")
]
Before = Annotated[int | None, Query(ge=0, le=2**62)]
Tail = Annotated[int, Query(ge=1, le=1000)]
Wait = Annotated[float, Query(ge=0, le=30, description="wait at most so many seconds for a line")]
LastEventId = Annotated[str | None, Header(max_length=19, pattern="^[0-9]+$")]  # what an EventSource saw last


@router.get("/logs", operation_id="listLogs", response_model=LogPage)
async def list_logs(jobs: JobsOf, request: Request, page_size: PageSize = 100, page_token: PageToken = "") -> Response:
    """Logs of the job's members on the master's host, by name: one for each member, in a cluster one for each of its epochs. Logs of
    members that are dead are there, too."""
    logs = _Logs(jobs, request)
    return _json(await logs.source.page(logs.job, page_size, page_token))


@router.get("/logs/{log}", operation_id="getLog", response_model=LogLines)
async def get_log(
    jobs: JobsOf,
    request: Request,
    log: LogName,
    after: After = None,
    before: Before = None,
    tail: Tail = 100,
    wait_s: Wait = 0.0,
) -> Response:
    """Lines of one log, oldest first: with `after` those that were written since, else the last ones. An answer has at most 1,000
    lines of 128 KiB of the file together; `next_after` and `next_before` lead to the rest. Tokens of Trireme are masked."""
    if after is not None and before is not None:
        raise InvalidArgument("`after` and `before` exclude each other: give one of them")
    logs, deadline = _Logs(jobs, request), clock.monotonic() + wait_s
    file = await logs.find(log)
    body, moved = await logs.source.lines(file, after, before, tail, partial(_answer, after))
    while not moved and (left_s := deadline - clock.monotonic()) > 0:
        await asyncio.sleep(min(LOOK_S, left_s))
        logs.check()
        body, moved = await logs.source.news(file, partial(_answer, file.cursor))
    return _json(body)


@router.get("/logs/{log}/stream", include_in_schema=False)
async def stream_log(
    jobs: JobsOf,
    request: Request,
    log: LogName,
    after: After = None,
    tail: Tail = 100,
    last_event_id: LastEventId = None,
) -> ServerSent:
    """As getLog, as server-sent events: each line with the `after` that follows it as its id."""
    logs, streams = _Logs(jobs, request), request.app.state.streams
    streams.check()
    file = await logs.find(log)
    begin = int(last_event_id) if last_event_id is not None else after

    async def following(wait_s: float) -> Messages:
        deadline = clock.monotonic() + wait_s
        while True:
            logs.check()
            messages, moved = await logs.source.news(file, partial(_messages, file.cursor))
            left_s = deadline - clock.monotonic()
            if moved or left_s <= 0:
                return messages
            await asyncio.sleep(min(LOOK_S, left_s))

    first, _ = await logs.source.lines(file, begin, None, tail, partial(_messages, begin))
    return ServerSent(first, following, streams)


class _Logs:
    """Those of the job that a request names. Raises NotFound, NotLeader, NotReady; Conflict if it names none and there are several."""

    def __init__(self, jobs: JobsLed, request: Request) -> None:
        self._jobs = jobs
        self._named: str | None = request.path_params.get("job")
        self.job = self.check()
        self.source: LogSource = request.app.state.logs
        self.source.check()

    def check(self) -> str:
        """The job's name: the process leads it, or knows it and leads the cluster."""
        try:
            master = self._jobs.find(self._named)
        except (Conflict, NotReady):
            if not isinstance(self._jobs, ClusterMaster) or self._named is None:
                raise
            self._jobs.check_leading()
            return self._named
        self._jobs.check_leading()
        return master.keys.job

    async def find(self, log: str) -> LogFile:
        """Raises NotFound, with the host where the log lies if that is known."""
        if (file := await self.source.find(self.job, log)) is not None:
            return file
        msg = f"there is no log {log[:100]!r} of job {self.job} on the master's host"
        for member in self._jobs.state.members.values() if isinstance(self._jobs, ClusterMaster) else ():
            if f"{log}-".startswith(f"{member.member}-"):
                where = f"the host agent {member.agent} on {member.host} keeps the logs of {member.member}"
                hint = f"`trireme logs --data-dir` reads them there, below logs/{self.job} of its data folder"
                raise NotFound(f"{msg}: {where}", hint=hint, host=member.host, agent=member.agent)
        raise NotFound(msg, hint=f"listLogs names those that are there; {ELSEWHERE}")


def _answer(before: int | None, file: LogFile, lines: list[Line]) -> tuple[bytes, bool]:
    """And whether the cursor has moved: also by what is not shown."""
    return shown(file, lines).model_dump_json().encode(), bool(lines) or before not in (None, file.cursor)


def _messages(before: int | None, file: LogFile, lines: list[Line]) -> tuple[Messages, bool]:
    found = [(str(line.end), LogLine(time=line.time, text=line.text).model_dump_json()) for line in lines]
    return found, bool(lines) or before not in (None, file.cursor)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")

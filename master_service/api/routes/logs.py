"""What the members of a job wrote, dead ones included. Who follows a log by its cursor misses no line and
sees none twice.

request ─► a thread: listing, lines from the end or after a cursor, JSON ─► answer
no file is read by the event loop
"""

from __future__ import annotations

import asyncio
import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi import Path as InPath

from master_service.api.render import page_of
from master_service.api.routes.dependencies import JobsOf, PageSize, PageToken, find_led
from master_service.api.server_sent import Messages, ServerSent
from master_service.cluster.leader import ClusterMaster, JobsLed
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.runtime.log_files import Line, LogFile
from trireme_shared.protocol.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    TooManyRequests,
)
from trireme_shared.protocol.rest import LogLine, LogLines, LogPage, LogView
from trireme_shared.protocol.times import rfc3339

router = APIRouter(tags=["logs"])
# as in events.py
STREAMS = {"/v1/jobs/{job}/logs/{log}/stream": frozenset({"after", "tail"})}
LOOK_S = 0.5  # how often a file is looked at while somebody waits

LogName = Annotated[str, InPath(max_length=300)]
After = Annotated[
    int | None, Query(ge=0, le=2**62, description="next_after of the answer before; 0: from the beginning")
]
Before = Annotated[int | None, Query(ge=0, le=2**62)]
Tail = Annotated[int, Query(ge=1, le=1000)]
Wait = Annotated[float, Query(ge=0, le=30, description="wait at most so many seconds for a line")]
LastEventId = Annotated[str | None, Header(max_length=19, pattern="^[0-9]+$")]  # what an EventSource saw last


@router.get("/logs", operation_id="listLogs", response_model=LogPage)
async def list_logs(
    jobs: JobsOf, request: Request, page_size: PageSize = 100, page_token: PageToken = ""
) -> Response:
    """Logs of the job's members on the master's host, by name: one for each member, in a cluster one for each
    of its epochs. Logs of members that are dead are there, too."""
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
    """Lines of one log, oldest first: with `after` those that were written since, else the last ones. An
    answer has at most 1,000 lines of 128 KiB of the file together; `next_after` and `next_before` lead to the
    rest. Tokens of Trireme are masked."""
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
    """Those of the job that a request names. Raises NotFound, NotLeader, NotReady; Conflict if it names none
    and there are several."""

    def __init__(self, jobs: JobsLed, request: Request) -> None:
        self._jobs = jobs
        self._named: str | None = request.path_params.get("job")
        self.job = self.check()
        self.source: LogSource = request.app.state.logs
        self.source.check()

    def check(self) -> str:
        """The job's name: the process leads it, or knows it and leads the cluster."""
        master = find_led(self._jobs, self._named)
        self._jobs.check_leading()
        return master.keys.job if master is not None else str(self._named)

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


SUFFIX = ".log"
THREADS = 1
# a thread that works in Python holds the lock of the interpreter for 5 ms at a time: the event loop would
# wait
PAUSE_S = 0.0002
ANSWER_LINES = 1000
ANSWER_BYTES = 128 << 10  # of the file; answers that nobody takes lie in memory for some seconds
READ_S = 8.0
_OWN_ID = re.compile(r"-[0-9a-f]{12}$")
ELSEWHERE = (
    "logs of members on other hosts lie in the data folders of their host agents; `trireme logs "
    "--data-dir` reads them there"
)

T = TypeVar("T")


class LogSource:
    """Logs of a job's members, from files of the machine that the master runs on. A name from a request is
    only compared with the listing.

    `folders`: patterns (as of a shell) of the folders where logs lie. `by_job`: each of these has a folder
    for each job. At most `most` reads at once: of more, each raises TooManyRequests.
    """

    def __init__(self, folders: Sequence[str] = (), *, by_job: bool = False, most: int = 64) -> None:
        self._folders, self._by_job, self._most = folders, by_job, most
        self._reads: set[asyncio.Future[Any]] = set()
        self._threads = ThreadPoolExecutor(THREADS, "logs")  # a thread starts with the first read

    def __repr__(self) -> str:
        return f"<LogSource {' '.join(self._folders) or 'without folders'}: {len(self._reads)} reads>"

    def check(self) -> None:
        """Raises NotFound: the master has no folder of logs."""
        if not self._folders:
            msg = "this master was started without a folder of logs (TRIREME_LOGS), so it cannot serve any"
            raise NotFound(msg, hint=ELSEWHERE)

    async def page(self, job: str, page_size: int, page_token: str) -> bytes:
        """A LogPage as JSON. `job` is one that the process knows."""
        return await self._in_thread(lambda: self._page(job, page_size, page_token))

    async def find(self, job: str, name: str) -> LogFile | None:
        """The log of that name, or that of the member with that id: the one of its last epoch."""
        path = await self._in_thread(lambda: _named(self._paths(job), name))
        return LogFile(path, pause=_give_way) if path is not None else None

    async def lines(
        self,
        file: LogFile,
        after: int | None,
        before: int | None,
        tail: int,
        show: Callable[[LogFile, list[Line]], T],
    ) -> T:
        """What was written after byte `after`; None: the last `tail` lines before byte `before`. Then `news`
        goes on. `show` makes an answer of them in the thread. Raises NotFound if the file is gone."""

        def read() -> T:
            if after is not None:
                return show(file, file.news_after(after, count=ANSWER_LINES, most=ANSWER_BYTES))
            return show(file, file.last(tail, before=before, most=ANSWER_BYTES))

        return await self._in_thread(read)

    async def news(self, file: LogFile, show: Callable[[LogFile, list[Line]], T]) -> T:
        """What was written since. Raises NotFound if the file is gone."""
        return await self._in_thread(lambda: show(file, file.news(count=ANSWER_LINES, most=ANSWER_BYTES)))

    async def _in_thread(self, read: Callable[[], T]) -> T:
        """A read counts until it has ended, also if nobody waits for it any more: a file system that hangs
        takes no more of them."""
        if len(self._reads) >= self._most:
            raise TooManyRequests(
                f"{len(self._reads)} reads of logs are in progress here, at most {self._most} may be"
            )
        reading = asyncio.get_running_loop().run_in_executor(self._threads, _told, read)
        self._reads.add(reading)
        reading.add_done_callback(self._reads.discard)
        try:
            async with asyncio.timeout(READ_S):
                found = await asyncio.shield(reading)
        except TimeoutError as error:
            raise DeadlineExceeded(f"a log could not be read within {READ_S:g} s; ask again") from error
        if isinstance(found, OSError):
            raise NotFound(f"the log cannot be read any more: {found.strerror}") from found
        return found

    def _page(self, job: str, page_size: int, page_token: str) -> bytes:
        page, token = page_of(self._paths(job).items(), lambda log: (log[0],), page_size, page_token)
        return LogPage(logs=tuple(_views(page)), next_page_token=token).model_dump_json().encode()

    def _paths(self, job: str) -> dict[str, Path]:
        """By the name of the log. Links are left out: they may lead anywhere."""
        found: dict[str, Path] = {}
        for pattern in self._folders:
            for folder in sorted(glob.glob(pattern)):  # noqa: PTH207  absolute ones
                place = Path(folder) / job if self._by_job else Path(folder)
                try:
                    with os.scandir(place) as entries:
                        logs = [each for each in entries if each.name.endswith(SUFFIX)]
                        files = [Path(each.path) for each in logs if each.is_file(follow_symlinks=False)]
                except OSError:  # no member of the job ran there
                    continue
                found |= {path.stem: path for path in files}
        return found


def shown(file: LogFile, lines: Sequence[Line]) -> LogLines:
    made = tuple(LogLine(time=line.time, text=line.text) for line in lines)
    return LogLines(log=file.member, lines=made, next_after=file.cursor, next_before=file.begin)


def _give_way() -> None:
    clock.sleep(PAUSE_S)


def _told(read: Callable[[], T]) -> T | OSError:
    """As a value: nobody may be there any more to take an error."""
    try:
        return read()
    except OSError as error:
        return error


def _views(paths: Sequence[tuple[str, Path]]) -> Iterator[LogView]:
    for name, path in paths:
        try:
            status = path.stat(follow_symlinks=False)
        except OSError:  # it was deleted
            continue
        yield LogView(log=name, bytes=status.st_size, write_time=rfc3339(status.st_mtime))


def _named(paths: dict[str, Path], name: str) -> Path | None:
    if name in paths:
        return paths[name]
    member = _OWN_ID.sub("", name)
    epochs = [
        int(log.removeprefix(f"{member}-"))
        for log in paths
        if re.fullmatch(re.escape(member) + r"-\d{1,9}", log)
    ]
    return paths.get(f"{member}-{max(epochs)}" if epochs else member)

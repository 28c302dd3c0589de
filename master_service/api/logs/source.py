"""Logs of a job's members, from files of the machine that the master runs on. A name from a request is only compared with the listing.

request ─► a thread: listing, lines from the end or after a cursor, JSON ─► answer            no file is read by the event loop
"""

from __future__ import annotations

import asyncio
import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from master_service.api.pages import offset_of, page_of
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.runtime.log_files import Line, LogFile
from trireme_shared.protocol.errors import DeadlineExceeded, NotFound, TooManyRequests
from trireme_shared.protocol.rest import LogLine, LogLines, LogPage, LogView
from trireme_shared.protocol.times import rfc3339

SUFFIX = ".log"
THREADS = 1
PAUSE_S = 0.0002  # a thread that works in Python holds the lock of the interpreter for 5 ms at a time: the event loop would wait
ANSWER_LINES = 1000
ANSWER_BYTES = 128 << 10  # of the file; answers that nobody takes lie in memory for some seconds
READ_S = 8.0
_OWN_ID = re.compile(r"-[0-9a-f]{12}$")
ELSEWHERE = "logs of members on other hosts lie in the data folders of their host agents; `trireme logs --data-dir` reads them there"

T = TypeVar("T")


class LogSource:
    """`folders`: patterns (as of a shell) of the folders where logs lie. `by_job`: each of these has a folder for each job. At most
    `most` reads at once: of more, each raises TooManyRequests."""

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
        """A LogPage as JSON. `job` is one that the process knows. Logs are not deleted while their job is there, so none is left
        out by who pages."""
        return await self._in_thread(lambda: self._page(job, offset_of(page_token), page_size))

    async def find(self, job: str, name: str) -> LogFile | None:
        """The log of that name, or that of the member with that id: the one of its last epoch."""
        path = await self._in_thread(lambda: _named(self._paths(job), name))
        return LogFile(path, pause=_give_way) if path is not None else None

    async def lines(
        self, file: LogFile, after: int | None, before: int | None, tail: int, show: Callable[[LogFile, list[Line]], T]
    ) -> T:
        """What was written after byte `after`; None: the last `tail` lines before byte `before`. Then `news` goes on. `show` makes an
        answer of them in the thread. Raises NotFound if the file is gone."""

        def read() -> T:
            if after is not None:
                return show(file, file.news_after(after, count=ANSWER_LINES, most=ANSWER_BYTES))
            return show(file, file.last(tail, before=before, most=ANSWER_BYTES))

        return await self._in_thread(read)

    async def news(self, file: LogFile, show: Callable[[LogFile, list[Line]], T]) -> T:
        """What was written since. Raises NotFound if the file is gone."""
        return await self._in_thread(lambda: show(file, file.news(count=ANSWER_LINES, most=ANSWER_BYTES)))

    async def _in_thread(self, read: Callable[[], T]) -> T:
        """A read counts until it has ended, also if nobody waits for it any more: a file system that hangs takes no more of them."""
        if len(self._reads) >= self._most:
            raise TooManyRequests(f"{len(self._reads)} reads of logs are in progress here, at most {self._most} may be")
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

    def _page(self, job: str, start: int, page_size: int) -> bytes:
        paths = sorted(self._paths(job).items())
        page, token = page_of(paths, start, page_size)
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
        int(log.removeprefix(f"{member}-")) for log in paths if re.fullmatch(re.escape(member) + r"-\d{1,9}", log)
    ]
    return paths.get(f"{member}-{max(epochs)}" if epochs else member)

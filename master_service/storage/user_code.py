"""Counts records by the user's own code, a `Custom` reader or the length of an object, in a process of its
own: whatever that code does, the leader of all jobs goes on.

leader ─ CountRequest ─► process (counting_process.py) ─ Counted, one for each file ─► leader
                                                       └ the table, or the error ─► FileTable, DatasetError
exits, crashes, is silent for `limit_s` ─► killed: DatasetError with the last lines that it printed
the leader steps down ─► SIGTERM: what is counted is kept for the next one ─ KEEP_S later ─► SIGKILL

The process is the first that the kernel kills if memory is short, and leaves the processors to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from typing import Any

from pydantic import Field, ValidationError

from master_service.core.queue.file_table import FileTable, TaskSizes
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.runtime.out_of_memory import memory_kills
from trireme_shared.platform.runtime.process_setup import die_with_parent
from trireme_shared.platform.runtime.telemetry import hidden
from trireme_shared.protocol.errors import DatasetError, from_map
from trireme_shared.protocol.records.datasets import Dataset
from trireme_shared.protocol.records.record import Record

PROCESS = (sys.executable, "-P", "-m", "master_service.storage.counting_process")
KEEP_S, LOOKS = 1.0, 50
LAST_LINES, LINE_CHARACTERS = 15, 500
MOST_LINES = 200  # in our log
ANSWER_BYTES = 256 << 20  # a line: the table of a million files
LINE_BYTES = 64 << 10

log = telemetry.logger("user_code")


class CountRequest(Record):
    """`folder`: the one of the job's script. `minibatch`, `streams`, `fixed`, `drop_last`: see TaskSizes."""

    dataset: Dataset
    storage: str
    folder: str
    seed: int
    minibatch: int
    streams: int
    fixed: int | None
    drop_last: bool

    @property
    def sizes(self) -> TaskSizes:
        return TaskSizes(self.minibatch, self.streams, self.fixed, self.drop_last)


class Counted(Record):
    """`files`: so many are counted. At the end `table` (FileTable.to_map), or `error` (TriremeError.to_map);
    `system`: it comes from the system below the user's code."""

    files: int = 0
    table: dict[str, Any] | None = None
    digest: str = ""
    error: dict[str, Any] | None = None
    system: str = Field(default="", description="The OSError that was the cause.")


async def count_apart(request: CountRequest, limit_s: float) -> FileTable:
    """`limit_s`: for the import of the user's module and for each file. Raises DatasetError, and what
    counting raises."""
    process = await asyncio.create_subprocess_exec(
        *PROCESS,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if not name.startswith("TRIREME_")},
        start_new_session=True,
        preexec_fn=die_with_parent(),
        limit=ANSWER_BYTES,
    )
    memory_kills().look()  # those until now are not of this process
    since = clock.monotonic()
    printed = deque[str](maxlen=LAST_LINES)
    try:
        async with asyncio.TaskGroup() as group:
            output = group.create_task(_pass_on(process, printed))
            answer, why = await _answer(process, request, limit_s)
            if not why:
                await _until_ended(process)
            _kill(process)
            await asyncio.wait([output], timeout=KEEP_S)  # its last lines
            output.cancel()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.shield(asyncio.ensure_future(_until_ended(process)))
        raise
    finally:
        _kill(process)
        code = await asyncio.shield(asyncio.ensure_future(process.wait()))
    if answer is None:
        msg = f"{_name(request.dataset)}, which counts the records, {why or _ended(code, since)}"
        raise DatasetError(
            msg,
            hint="count(url), or len() of the object, and the module that has it have to work in a process "
            "without a terminal",
            output="\n".join(printed),
        )
    if answer.error is not None:
        error = from_map(answer.error)
        raise error from (OSError(answer.system) if answer.system else None)
    assert answer.table is not None
    return FileTable.from_map(answer.table, answer.digest)


async def _answer(
    process: asyncio.subprocess.Process, request: CountRequest, limit_s: float
) -> tuple[Counted | None, str]:
    """Its last word; None: it ended without, or has to be ended, and why."""
    assert process.stdin is not None, "the process has no input"
    assert process.stdout is not None, "the process has no output"
    with contextlib.suppress(ConnectionError):  # it has ended already
        process.stdin.write(request.to_bytes() + b"\n")
        await process.stdin.drain()
    files = 0
    while True:
        try:
            async with asyncio.timeout(limit_s):
                line = await process.stdout.readline()
                if not line:
                    return None, ""
        except TimeoutError:
            return None, f"was not done within {limit_s:g} s (task_timeout_ceiling_s), after {files} files"
        try:
            told = Counted.model_validate_json(line)
        except ValidationError as error:
            return None, f"gave no answer but {error}"[:LINE_CHARACTERS]
        if told.table is not None or told.error is not None:
            return told, ""
        files = told.files


async def _pass_on(process: asyncio.subprocess.Process, printed: deque[str]) -> None:
    """What the user's code prints: into our log, and the last lines into `printed`."""
    assert process.stderr is not None, "the process has no output"
    rest, count = b"", 0
    while chunk := await process.stderr.read(LINE_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        rest = rest[-LINE_BYTES:]
        for line in lines:
            text = hidden(line.decode(errors="replace").rstrip())[:LINE_CHARACTERS]
            printed.append(text)
            count += 1
            if count <= MOST_LINES:
                log.info("counting_output", line=text)
    if rest:
        printed.append(hidden(rest.decode(errors="replace"))[:LINE_CHARACTERS])


async def _until_ended(process: asyncio.subprocess.Process) -> None:
    """At most KEEP_S. Not by `wait`: what it has started may still have its output."""
    for _ in range(LOOKS):
        if process.returncode is not None:
            return
        await asyncio.sleep(KEEP_S / LOOKS)


def _kill(process: asyncio.subprocess.Process) -> None:
    """All of its group: what the user's code has started, too."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _ended(code: int, since: float) -> str:
    if code == -signal.SIGKILL and (cause := memory_kills().claim(since)):
        return f"ran {cause}"
    if code < 0:
        return f"ended its process with {signal.Signals(-code).name}"
    return f"ended its process with exit code {code}"


def _name(dataset: Dataset) -> str:
    return str(getattr(dataset, "reader", dataset.kind))

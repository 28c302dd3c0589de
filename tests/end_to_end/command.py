"""`trireme run` as a user runs it: in a process of its own. No child process may be left afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from tests.equipment.command_lines import command_line
from tests.equipment.forked import MARK, ForkedProcess, clean_environment, warm_server
from trireme.cli.targets import job_target
from trireme.view.job_address import open_job
from trireme_shared.protocol.errors import TriremeError

TIMEOUT_S = 150
Running = subprocess.Popen[str] | ForkedProcess


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


class Command:
    """Starts `trireme ...` in `folder`, and finds its descendants by a mark in their environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.environment: dict[str, str] = {}

    def start(
        self, *arguments: object, stderr_to: IO[str] | int = subprocess.PIPE, **environment: str
    ) -> subprocess.Popen[str]:
        """A new interpreter."""
        return subprocess.Popen(
            [sys.executable, "-m", "trireme", *map(str, arguments)],
            cwd=self.folder,
            env=self._environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr_to,
            text=True,
        )

    def run(self, *arguments: object, **environment: str) -> Done:
        """Until its end. It is forked from a process that has imported the commands; `start` starts a new
        interpreter."""
        if not warm_server().imports_as(self._environment(environment)):
            with self.start(*arguments, **environment) as process:
                return self.end_of(process)
        return self.end_of(self.begin(*arguments, **environment))

    def begin(self, *arguments: object, **environment: str) -> ForkedProcess:
        """Forked, with its output to read while it runs (`wait_for`), and at its end (`end_of`)."""
        with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
            begun = self.fork(*arguments, out=out, err=err, **environment)
            # `communicate` closes them
            begun.stdout, begun.stderr = (Path(file.name).open(encoding="utf-8") for file in (out, err))  # noqa: SIM115
        return begun

    def fork(self, *arguments: object, out: IO[Any], err: IO[Any], **environment: str) -> ForkedProcess:
        words = list(map(str, arguments))
        return warm_server().start(
            "trireme", words, self.folder, self._environment(environment), out.fileno(), err.fileno()
        )

    def _environment(self, more: dict[str, str]) -> dict[str, str]:
        return clean_environment() | {MARK: self.mark} | self.environment | more

    def end_of(self, process: Running) -> Done:
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return Done(process.returncode, out, err)

    def family(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


@contextlib.contextmanager
def command_in(folder: Path) -> Iterator[Command]:
    """Fails if anybody is left a second after the end."""
    command = Command(folder)
    try:
        yield command
        deadline = time.monotonic() + 1
        while (left := command.family()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"left behind: {[command_line(process) for process in left]}"
    finally:
        for process in command.family():
            process.kill()


def wait_for(process: Running, pattern: str) -> re.Match[str]:
    """Read stderr until a line matches; what follows is still to be read."""
    seen = []
    for line in _lines(process):
        seen.append(line)
        if found := re.search(pattern, line):
            return found
    pytest.fail(f"ended without {pattern!r}: {''.join(seen)}")


def _lines(process: Running) -> Iterator[str]:
    """Of its stderr, a pipe or a file that it writes, until its end."""
    assert process.stderr is not None
    part = ""
    while True:
        has_ended = process.poll() is not None
        part += process.stderr.readline()
        if part.endswith("\n"):
            yield part
            part = ""
        elif has_ended:
            return
        else:
            time.sleep(0.02)


def wait_for_step(trireme: Command, step: int, data_dir: Path | None = None, job: str = "script") -> int:
    """Until the master of `job` has heard of `step`; asked as `trireme status` does."""

    async def reached() -> int:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(TriremeError):
                    place = data_dir or trireme.folder / ".trireme"
                    target = job_target(job, place, None)
                    async with open_job(target.address, token=target.token) as (client, name):
                        while (at := (await client.get_job(name)).progress.step or 0) < step:
                            await asyncio.sleep(0.05)
                        return at
                await asyncio.sleep(0.05)

    return asyncio.run(reached())

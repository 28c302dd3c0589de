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

from shared.errors import TriremeError
from tests.equipment.forked import MARK, ForkedProcess, clean_environment, warm_server
from trireme.cli.targets import job_target
from trireme.view.job_address import open_client

TIMEOUT_S = 150


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
        """Until its end. It is forked from a process that has imported the commands; `start` starts a new interpreter."""
        if not warm_server().imports_as(self._environment(environment)):
            with self.start(*arguments, **environment) as process:
                return self.end_of(process)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            with self.fork(*arguments, out=out, err=err, **environment) as forked:
                try:
                    code = forked.wait(TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    forked.kill()
                    raise
            for file in (out, err):
                file.seek(0)
            return Done(code, out.read().decode(), err.read().decode())

    def fork(self, *arguments: object, out: IO[Any], err: IO[Any], **environment: str) -> ForkedProcess:
        words = list(map(str, arguments))
        return warm_server().start(
            "trireme", words, self.folder, self._environment(environment), out.fileno(), err.fileno()
        )

    def _environment(self, more: dict[str, str]) -> dict[str, str]:
        return clean_environment() | {MARK: self.mark} | self.environment | more

    def end_of(self, process: subprocess.Popen[str]) -> Done:
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
        assert not left, f"left behind: {[process.cmdline() for process in left]}"
    finally:
        for process in command.family():
            process.kill()


def wait_for(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """Read stderr until a line matches."""
    seen = []
    assert process.stderr is not None
    for line in process.stderr:
        seen.append(line)
        if found := re.search(pattern, line):
            return found
    pytest.fail(f"ended without {pattern!r}: {''.join(seen)}")


def wait_for_step(trireme: Command, step: int, data_dir: Path | None = None, job: str = "script") -> int:
    """Until the master of `job` has heard of `step`; asked as `trireme status` does."""

    async def reached() -> int:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(TriremeError):
                    place = data_dir or trireme.folder / ".trireme"
                    target = job_target(job, place, None)
                    async with open_client(target.address, token=target.token) as client:
                        while (at := (await client.job())["progress"].get("step") or 0) < step:
                            await asyncio.sleep(0.05)
                        return int(at)
                await asyncio.sleep(0.05)

    return asyncio.run(reached())

"""Inspect the user's script in a child process, and try it, before anything is started.

The launcher itself never imports the script (nor torch). `python -m trainer_agent inspect SCRIPT` prints one
JSON object: {"config": {...}, "dataset": {...}, "evaluation_dataset": {...} | null, "model": {...}} or
{"error": {...}}; with `backend` nccl also "nccl".
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from trireme.config import ConfigError
from trireme.launch.processes import PYTHON_MODULE, Process, Start, inherited_environment, spawn
from trireme.settings import UsageError
from trireme.validation import with_origins
from trireme.view.live_progress import LOOK_S, Printed
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.records import UserFailure

TIMEOUT_S = 300.0
USAGE = 2
CHECK = "check"  # before what a script prints meanwhile
NOWHERE: Mapping[str, str] = MappingProxyType({})


class ScriptError(Exception):
    """The user's code raised; its traceback is the message."""

    def __init__(self, failure: UserFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Inspection:
    config: dict[str, Any]
    dataset: dict[str, Any]
    evaluation_dataset: dict[str, Any] | None
    model: dict[str, Any] | None = None
    notice: str = ""  # for the user
    nccl: bool | None = None  # whether this host has it; None: backend is not nccl

    @property
    def readers(self) -> list[str]:
        """The modules of the user's own readers."""
        found = (dataset.get("reader") for dataset in (self.dataset, self.evaluation_dataset) if dataset)
        return [str(reader).partition(":")[0] for reader in found if reader]


def check_path(script: Path) -> None:
    """Raises UsageError if there is no such file, or this user may not read it."""
    try:
        there = script.is_file()
        if there:
            script.open("rb").close()
    except PermissionError as error:
        msg = f"{script} cannot be read by this user ({os.getuid()}): {error.strerror}"
        hint = "let it read the file, and enter the folders above it: chmod -R a+rX FOLDER"
        raise UsageError(msg, hint=hint) from error
    if not there:
        what = "is a directory" if script.is_dir() else "does not exist"
        msg = (
            f"{script} {what}; give the path of a Python file that defines model, dataset, loss and "
            "optimizer, or calls trireme.prepare"
        )
        raise UsageError(msg)


async def inspect(
    script: Path,
    settings: Mapping[str, Any],
    *,
    check: bool = True,
    start: Start = spawn,
    origins: Mapping[str, str] = NOWHERE,
) -> Inspection:
    """Raises UsageError if the file is not a training script, ScriptError if its code raises.

    `check`: also build the model and run one minibatch forward and backward. `settings` override the script's
    config. `origins`: where each was given, for messages.
    """
    argv = [*PYTHON_MODULE, "trainer_agent", "inspect", str(script)]
    if not check:
        argv.append("--no-check")
    for name, value in settings.items():
        if isinstance(
            value, list | tuple | dict
        ):  # of trireme.toml or repeated flags; none of them matters to one minibatch
            continue
        argv += ["--set", f"{name}={'' if value is None else value}"]
    with tempfile.TemporaryFile() as out, tempfile.NamedTemporaryFile() as named:
        err = named.file
        child = await start(argv, inherited_environment(), out, err)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                code = await _watched(child, Path(named.name))
        except TimeoutError as error:
            msg = (
                f"{script} took more than {TIMEOUT_S:g} s to import, build its model and run one "
                "minibatch; --no-check skips this check"
            )
            raise UsageError(msg) from error
        finally:
            if child.returncode is None:
                child.send_signal(signal.SIGKILL)
                await child.wait()
        printed, errors = (_text(file) for file in (out, err))
    return _read_answer(script, code, printed, errors, origins)


async def _watched(child: Process, printed: Path) -> int:
    """The exit code; what the script prints is shown meanwhile."""
    ended, output = asyncio.ensure_future(child.wait()), Printed(printed, stays=False)
    try:
        while not ended.done():
            await asyncio.wait([ended], timeout=LOOK_S)
            for line in output.news(clock.monotonic(), last=ended.done()):
                print(f"{CHECK} │ {line}", file=sys.stderr)  # noqa: T201
    finally:
        ended.cancel()
    return ended.result()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _read_answer(script: Path, code: int, out: str, err: str, origins: Mapping[str, str]) -> Inspection:
    lines = out.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        died = f"signal {-code}" if code < 0 else f"exit code {code}"
        tail = "\n".join(err.strip().splitlines()[-15:])
        raise ScriptError(
            UserFailure(
                error_type="", message=f"{script} ended the process that imports it ({died})", traceback=tail
            )
        )
    error = answer.get("error")
    if isinstance(error, dict):
        details = error.get("details") or {}
        if code == USAGE and details.get("problems"):
            every = {name: f"config {name}" for name in details["config"]} | dict(origins)
            raise UsageError("; ".join(with_origins(problem, every) for problem in details["problems"]))
        if code == USAGE:
            raise UsageError(str(error.get("message", "")), hint=str(error.get("hint", "")))
        if details.get("error_type") == ConfigError.__name__:
            raise UsageError(f"{script}: {details.get('error_message', '')}")
        raise ScriptError(
            UserFailure(
                error_type=str(details.get("error_type", "")),
                message=str(details.get("error_message") or error.get("message", "")),
                traceback=str(details.get("traceback", "")),
                task=str(details.get("task", "")),
            )
        )
    return Inspection(
        answer.get("config") or {},
        answer["dataset"],
        answer.get("evaluation_dataset"),
        answer.get("model"),
        answer.get("notice", ""),
        answer.get("nccl"),
    )

"""Ask a child process what the user's script says, and whether it works, before anything is started.

The launcher itself never imports the script (nor torch). `python -m trainer_agent inspect SCRIPT` prints one JSON
object: {"config": {...}, "dataset": {...}, "evaluation_dataset": {...} | null} or {"error": {...}}.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.etcd.embedded import die_with_parent
from shared.records import UserFailure
from trireme.config import ConfigError
from trireme.spec import UsageError

TIMEOUT_S = 300.0
USAGE = 2
ANSWER_BYTES = 16 << 20


class ScriptError(Exception):
    """The user's code raised: its own traceback is all there is to say."""

    def __init__(self, failure: UserFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Inspection:
    config: dict[str, Any]
    dataset: dict[str, Any]
    evaluation_dataset: dict[str, Any] | None


def check_path(script: Path) -> None:
    """Raises UsageError if there is no such file."""
    if not script.is_file():
        what = "is a directory" if script.is_dir() else "does not exist"
        msg = f"{script} {what}; give the path of a Python file that defines model, dataset, loss and optimizer"
        raise UsageError(msg)


async def inspect(script: Path, settings: Mapping[str, Any], *, check: bool = True) -> Inspection:
    """Raises UsageError if this is no script for us, ScriptError if it raises by itself.

    `check`: also build the model and run one minibatch forward and backward, with `settings` over the script's config.
    """
    argv = [sys.executable, "-P", "-m", "trainer_agent", "inspect", str(script)]
    if not check:
        argv.append("--no-check")
    for name, value in settings.items():
        argv += ["--set", f"{name}={value}"]
    child = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if not name.startswith("TRIREME_")},
        limit=ANSWER_BYTES,
        start_new_session=True,
        preexec_fn=die_with_parent(),
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            out, err = await child.communicate()
    except TimeoutError as error:
        msg = f"{script} took more than {TIMEOUT_S:g} s to import, build its model and run one minibatch; --no-check skips the trial"
        raise UsageError(msg) from error
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    return _read_answer(script, child.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace"))


def _read_answer(script: Path, code: int, out: str, err: str) -> Inspection:
    lines = out.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        died = f"signal {-code}" if code < 0 else f"exit code {code}"
        tail = "\n".join(err.strip().splitlines()[-15:])
        raise ScriptError(
            UserFailure(error_type="", message=f"{script} ended the process that imports it ({died})", traceback=tail)
        )
    error = answer.get("error")
    if isinstance(error, dict):
        details = error.get("details") or {}
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
    return Inspection(answer.get("config") or {}, answer["dataset"], answer.get("evaluation_dataset"))

"""How a background run ended, from its last message (messages.py) or from the death of its process."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trireme.background.errors import InvalidSetting, JobFailed, JobStopped, in_python
from trireme.launch import (
    processes,  # noqa: F401  from_map knows the errors of modules that are loaded
)
from trireme.settings import UsageError
from trireme.view.report import failure_lines
from trireme_shared.protocol.errors import PeerError, TriremeError, UserCodeError, from_map
from trireme_shared.protocol.records import Phase, UserFailure


@dataclass(frozen=True, slots=True)
class End:
    """`result`: the document of a job that has ended; `error`: why it is not COMPLETED."""

    result: Mapping[str, Any] | None = None
    error: TriremeError | None = None

    @property
    def phase(self) -> str:
        """STOPPED also after an error of the launcher: the job is unfinished, and nobody runs it."""
        return str(self.result["phase"]) if self.result is not None else "STOPPED"


def end_of(told: Mapping[str, Any], what: str, again: str) -> End:
    """`told`: the message. `what`: for the user, `job digits`. `again`: the call that resumes it."""
    if "stopped" in told:
        return End(error=JobStopped(f"{what} was stopped before its end", hint=f"resume it: {again}"))
    if "failure" in told:
        failure = UserFailure.model_validate(told["failure"])
        details = {"error_type": failure.error_type, "traceback": failure.traceback, "task": failure.task}
        return End(error=UserCodeError("\n".join([f"{what} failed:", *failure_lines(failure)]), **details))
    if "error" in told:
        return End(error=_error_of(told["error"]))
    result = told["result"]
    return End(result, None if result["phase"] == Phase.COMPLETED else _failed(result))


def end_of_dead(code: int, said: str, what: str, again: str) -> End:
    """The process ended without a last message. `code`: as subprocess gives it; `said`: the end of its stderr."""
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    message = f"the process that runs {what} has ended ({how})"
    return End(error=PeerError("\n".join([message, *([said] if said else [])]), hint=f"resume it: {again}"))


def _error_of(told: Mapping[str, Any]) -> TriremeError:
    error = from_map({**told, "message": in_python(told["message"]), "hint": in_python(told["hint"])})
    if isinstance(error, UsageError):
        return InvalidSetting(error.message, hint=error.hint, **error.details)
    if tail := error.details.get("tail"):
        error.add_note(f"the end of {error.details.get('log')}:\n{tail}")
    return error


def _failed(result: Mapping[str, Any]) -> JobFailed:
    lines = failure_lines(UserFailure.model_validate(result["failure"])) if result["failure"] else []
    again = "goes on from its newest checkpoint" if result["resumable"] else "starts from the beginning"
    message = "\n".join([f"job {result['job']} failed: {result['reason']}", *lines])
    return JobFailed(message, hint=f"the same call {again}; logs: {result['logs']}", result=dict(result))

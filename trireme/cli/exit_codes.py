"""Exit codes of the command line, and how it reports errors: one message, never one of our own stack
traces."""

from __future__ import annotations

import json
import sys

from trireme.launch.run_folder import DiskFull, EtcdDamaged
from trireme.view.report import failure_lines
from trireme_shared.protocol.errors import (
    CallerError,
    CheckpointUnusable,
    Conflict,
    DatasetError,
    DeadlineExceeded,
    Forbidden,
    NotFound,
    PeerError,
    TriremeError,
    Unauthorized,
    UserCodeError,
)
from trireme_shared.protocol.records import UserFailure
from trireme_shared.protocol.urls import without_passwords

OK, JOB_FAILED, USAGE, NOT_FOUND, CONFLICT, AUTH, UNREACHABLE, TIMED_OUT, DISK_FULL, CANCELLED = range(10)
DAMAGED = 10
INTERRUPTED = 130

_CODES: tuple[tuple[type[TriremeError], int], ...] = (  # the first match counts
    (DiskFull, DISK_FULL),
    (EtcdDamaged, DAMAGED),
    (DatasetError, JOB_FAILED),
    (CheckpointUnusable, JOB_FAILED),
    (UserCodeError, JOB_FAILED),
    (NotFound, NOT_FOUND),
    (Conflict, CONFLICT),
    (Unauthorized, AUTH),
    (Forbidden, AUTH),
    (DeadlineExceeded, TIMED_OUT),
    (PeerError, UNREACHABLE),
    (CallerError, USAGE),
)


def code_of(error: TriremeError) -> int:
    return next((code for kind, code in _CODES if isinstance(error, kind)), JOB_FAILED)


def report_error(error: TriremeError, *, as_json: bool) -> int:
    """Print the error (stderr; with --json also its map on stdout); returns the exit code."""
    lines = [f"error: {error.message}"]
    if error.hint:
        lines.append(f"hint: {error.hint}")
    if tail := error.details.get("tail"):
        lines += [f"the end of {error.details.get('log')}:", str(tail)]
    _print(lines, {"error": error.to_map()} if as_json else None)
    return code_of(error)


def report_script_error(failure: UserFailure, *, as_json: bool) -> int:
    """The user's own traceback, as Python would show it."""
    _print(failure_lines(failure), {"error": failure.model_dump()} if as_json else None)
    return JOB_FAILED


def _print(lines: list[str], document: object | None) -> None:
    print(without_passwords("\n".join(lines)), file=sys.stderr)  # noqa: T201
    if document is not None:
        print(without_passwords(json.dumps(document)))  # noqa: T201

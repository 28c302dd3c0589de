"""What `trireme.run` and its `Run` raise, beside the errors of trireme_shared.protocol.errors."""

from __future__ import annotations

import re

from trireme.config import ConfigError
from trireme.settings import UsageError
from trireme_shared.protocol.errors import DeadlineExceeded, TriremeError

_SHOWN_AS = "trireme"  # where users find them, as tracebacks say it
_FLAG = re.compile(r"--([a-z][a-z-]*[a-z])(?: ([A-Z]{2,}|\d+)\b)?")
_SWITCHES = {
    "fresh": "fresh=True",
    "accept_changes": "accept_changes=True",
    "no_check": "check=False",
    "insecure": "insecure=True",
}


class InvalidSetting(UsageError, ConfigError):
    """An argument, or a setting elsewhere, that the job cannot have: nothing was started."""

    __module__ = _SHOWN_AS


class JobFailed(TriremeError):
    """The job has ended, and its model is not trained. `details["result"]`: the document of its end."""

    __module__ = _SHOWN_AS
    code = "JOB_FAILED"


class JobStopped(TriremeError):
    """The run was stopped before the job's end. The same call resumes it."""

    __module__ = _SHOWN_AS
    code = "JOB_STOPPED"


class WaitTimedOut(DeadlineExceeded, TimeoutError):
    """The job goes on: wait again, or stop it."""

    __module__ = _SHOWN_AS


def in_python(text: str) -> str:
    """A sentence about flags of the command, as it is written in Python: `--fresh` -> `fresh=True`, `--job
    NAME` -> `job=NAME`."""

    def written(found: re.Match[str]) -> str:
        name, value = found[1].replace("-", "_"), found[2]
        if name in _SWITCHES:
            return _SWITCHES[name] + (f" {value}" if value else "")
        return f"{name}={value}" if value else name

    return _FLAG.sub(written, text).replace("interrupt again", "stop() again")

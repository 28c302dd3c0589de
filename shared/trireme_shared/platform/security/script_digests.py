"""The digests of a script and of the modules beside it, fixed when the job is created: members compare before they import.

    spec.sources = {"train.py": sha256, "features/text.py": sha256, ...}

So all members of a job run the same code, also one that is started again after somebody has changed a file. The digests do not
stop whoever can write both the files and the spec: those belong to the user who trains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from trireme_shared.protocol.errors import InvalidArgument

MAX_FILES = 256  # of one job


class ScriptChanged(InvalidArgument):
    """A file is not what it was when the job was created. Not the job's failure: the job goes on with the files of before, or when it
    is started again."""

    code = "SCRIPT_CHANGED"


def digest_of(path: Path) -> str:
    """SHA-256 of the content, in hex. Blocks. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check(script: Path, digests: Mapping[str, str]) -> None:
    """`digests`: path below the script's folder -> digest; empty: nobody has fixed any. Blocks. Raises ScriptChanged."""
    for name, expected in digests.items():
        path = script.resolve().parent / name
        try:
            found = digest_of(path)
        except OSError as error:
            found = f"unreadable ({error.strerror})"
        if found != expected:
            msg = f"{path} has changed since the job was created: its SHA-256 is {found[:12]}, the job's spec has {expected[:12]}"
            hint = "restore it, or stop the job and start it again: it then goes on with the changed file"
            raise ScriptChanged(msg, hint=hint)

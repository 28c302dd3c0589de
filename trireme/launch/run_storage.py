"""Where a run keeps its checkpoints, file tables and exports: in its own folder, or below --storage, which is checked before the start.

--storage s3://bucket/runs  ->  s3://bucket/runs/<job>/<run>      the same <run> when a job resumes, a new one otherwise

So no run ever writes, moves or deletes files of another run, on this machine or on any other with the same storage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from trireme.settings import UsageError
from trireme_shared.platform.runtime import ids
from trireme_shared.platform.storage import files
from trireme_shared.platform.storage.object_store import REQUEST_S, endpoint, is_s3
from trireme_shared.protocol.errors import PeerError, TriremeError, Unauthorized

REPORT_AFTER_S = 2.0


def place_of(base: str | None, job: str, folder: Path, last: str = "") -> str:
    """The storage of a run. `base`: value of --storage. `last`: storage of the run that is resumed."""
    if base is None:
        return str(folder)
    home = files.join(files.absolute(base), job)
    return last if last.startswith(f"{home}/") else files.join(home, ids.new_id("run"))


async def check(url: str, report: Callable[[str], None]) -> None:
    """Try a write and a read there, and delete unfinished files of a killed run: no other run uses this place.

    Raises UsageError, Unauthorized, PeerError (not reachable); the message says what to do.
    """
    work = asyncio.get_running_loop().run_in_executor(None, _check, url)
    done, _ = await asyncio.wait([work], timeout=REPORT_AFTER_S)
    if not done and is_s3(url):
        report(f"waiting for {url} at {endpoint() or 'Amazon S3'}, at most {REQUEST_S:g} s a request")
    try:
        await work
    except TriremeError:
        raise
    except (OSError, ValueError, NotImplementedError) as error:
        message = f"the job's storage cannot be used: {error}"
        match error:
            case ConnectionError():
                raise PeerError(message) from error
            case PermissionError() if is_s3(url):
                raise Unauthorized(message) from error
            case _:
                raise UsageError(message, hint="give another --storage") from error


def _check(url: str) -> None:
    files.check_writable(url)
    files.sweep(url)

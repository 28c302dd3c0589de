"""`python -m trireme.pool.task_process`: one attempt of a pre- or post-task of a job, as the child of a host
agent.

etcd ─► the job's record and script ─► /bin/sh -c command, or function() in this process ─► its exit code

Everything that the task starts is of this process's group. The agent signals the group. If the agent dies,
the group is killed, so that no attempt goes on that nobody knows of.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from types import FrameType

from pydantic import Field

from trireme_shared.datasets.user_modules import enter, import_named
from trireme_shared.platform.etcd.reading import must_read
from trireme_shared.platform.membership.local_script import LocalScripts
from trireme_shared.platform.membership.settings import MemberSettings
from trireme_shared.platform.runtime import clock, process_setup
from trireme_shared.protocol.errors import CallerError, InvalidArgument, PeerError, TriremeError
from trireme_shared.protocol.keys import ClusterKeys
from trireme_shared.protocol.records.cluster import ClusterJob
from trireme_shared.protocol.records.job_choices import JobTask

BEGIN_S = 60.0  # how long etcd may be away
PAUSE_S = 1.0
UNUSABLE = 70  # exit code of a task that could not begin
TERMINATED = 128 + signal.SIGTERM


class Settings(MemberSettings):
    """`task`: `pre-0`, ... `attempt`: which one this is. The other settings are those of every member."""

    task: str = Field(pattern=r"^(pre|post)-[0-9]+$")
    attempt: int = Field(ge=1)


def main() -> int:
    """The exit code of the task."""
    settings, parent = Settings.from_environment(), os.getppid()
    _end_with(parent)
    try:
        job, script = asyncio.run(_begin(settings))
        return _run(job, job.spec.named_tasks[settings.task], script)
    except TriremeError as error:
        sys.stderr.write(f"{settings.task} of job {settings.job} cannot begin: {error.message}\n")
        return UNUSABLE
    finally:
        sys.stdout.flush()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)  # what it left running in the background


def _end_with(parent: int) -> None:
    def on_signal(_: int, __: FrameType | None) -> None:
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)
        raise SystemExit(TERMINATED)

    signal.signal(signal.SIGTERM, on_signal)
    process_setup.hear_of_the_end_of(parent, signal.SIGTERM)


async def _begin(settings: Settings) -> tuple[ClusterJob, Path]:
    """Raises TriremeError: the job or its script is not there, or etcd was away for too long."""
    deadline = clock.monotonic() + BEGIN_S
    etcd, key = settings.connect(), ClusterKeys(settings.root).job(settings.job)
    try:
        while True:
            try:
                found = await etcd.get(key)
                if found is None:
                    raise InvalidArgument(f"there is no job {settings.job} any more")
                job = must_read(ClusterJob, key, found.value)
                return job, await LocalScripts(etcd, settings.root, settings.sources).find(
                    job.spec.script, job.spec.sources
                )
            except CallerError:
                raise
            except PeerError:
                if clock.monotonic() > deadline:
                    raise
                await asyncio.sleep(PAUSE_S)
    finally:
        await etcd.close()


def _run(job: ClusterJob, task: JobTask, script: Path) -> int:
    """In the script's folder."""
    told = {
        "TRIREME_STORAGE": job.spec.storage,
        "TRIREME_SCRIPT": str(script),
        "TRIREME_STANDING": str(job.standing),
    }
    os.environ.update(told)
    os.chdir(script.parent)
    if task.function:
        return _call(task.function, script.parent)
    with subprocess.Popen(  # noqa: S603  the user's own command
        ["/bin/sh", "-c", task.command], stdin=subprocess.DEVNULL
    ) as process:
        code = process.wait()
    return code if code >= 0 else 128 - code


def _call(function: str, folder: Path) -> int:
    module, _, name = function.partition(":")
    enter(folder)
    try:
        found = getattr(import_named(module), name)
    except (ImportError, AttributeError) as error:
        traceback.print_exc()
        raise InvalidArgument(f"{function} is not there: {error}") from error
    found()
    return 0


if __name__ == "__main__":
    sys.exit(main())

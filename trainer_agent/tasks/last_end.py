"""What the process before this one died at: told to the master, before this one begins anything.

the file of trireme_shared.platform.runtime.begun ─► one report for each thing that it had begun ─► the master counts deaths by place
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

from trainer_agent.data import minibatch_indices, minibatches_in
from trainer_agent.tasks.master import MasterPort
from trainer_agent.waiting import retry
from trireme_shared.platform.runtime import begun, telemetry
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.records import FailTask, JobSpec, UserFailure
from trireme_shared.protocol.records.tasks import READING, BegunWork

DIED = "ProcessDied"
REPORT_S = 30.0
NAMED = 8

log = telemetry.logger("last_end")


def journal_file(job: str, name: str) -> Path:
    """The one that the launcher has named; else one of this user in the system's temporary folder, which a container keeps when it is started
    again."""
    given = os.environ.get(begun.FILE)
    return Path(given) if given else Path(tempfile.gettempdir()) / f"trireme-begun-{os.getuid()}-{job}-{name}"


async def report_last_end(left: begun.Left, spec: JobSpec, master: MasterPort) -> None:
    """A master that does not answer within REPORT_S hears nothing of it."""
    name = left.process.rpartition("-")[0] or left.process
    for work in filter(None, map(BegunWork.from_bytes, left.works)):
        message = f"{name} {_how(left, spec)} while it {_what(work, spec)}"
        log.warning("died_before", cause=message)
        failure = UserFailure(error_type=DIED, message=message, task=f"task {work.task}", trainer=left.process)
        failed = FailTask(trainer=left.process, attempt=0, failure=failure, epoch=work.epoch, died_at=work.minibatch)
        try:
            await retry(lambda: master.fail_task(work.task, failed), "reporting a death", REPORT_S)  # noqa: B023  awaited here
        except TriremeError as error:
            log.warning("death_unreported", cause=str(error))


def _how(left: begun.Left, spec: JobSpec) -> str:
    end = os.environ.get(begun.LAST_END, "")
    if left.hung:
        return f"hung for {spec.task_timeout_ceiling_s:g} s (task_timeout_ceiling_s)"
    if end == "exit code 1":  # as the thread ends it that needs no interpreter
        return f"ended with {end} (or kept the interpreter for {spec.task_timeout_ceiling_s:g} s; its log says which)"
    if end == "SIGKILL":
        return "was killed by SIGKILL (out of memory?)"
    if end.startswith("SIG"):
        return f"crashed with {end}"
    return f"ended with {end}" if end else "ended"


def _what(work: BegunWork, spec: JobSpec) -> str:
    """`computed records 288, 290-291 of train.csv (task 7, minibatch 2)`."""
    if work.minibatch == READING:
        return f"read records {work.first}-{work.first + work.count - 1} of {work.file} (task {work.task})"
    where = f"(task {work.task}, minibatch {work.minibatch})"
    if work.minibatch >= minibatches_in(work.count, spec.minibatch_size):
        return f"computed a minibatch of {work.file} {where}"  # the settings have changed since
    indices = minibatch_indices(
        spec.seed,
        work.epoch,
        int(work.task.rpartition("-")[2]),
        work.count,
        spec.minibatch_size,
        work.minibatch,
        shuffle=spec.shuffle and work.task.isdigit(),
    )
    return f"computed records {_ranges(np.sort(indices) + work.first)} of {work.file} {where}"


def _ranges(numbers: np.ndarray) -> str:
    """`3, 5-7 and 12 more`."""
    parts = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    named = [f"{part[0]}" if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts[:NAMED]]
    more = sum(len(part) for part in parts[NAMED:])
    return ", ".join(named) + (f" and {more} more" if more else "")

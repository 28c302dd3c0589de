"""Processes that read and collate for a trainer (`data_workers`).

    read(minibatch) ─► a free worker ─► Shard, collated if that draws no random numbers
        worker ends or is frozen ─► another one in its place, once more ─► and again: DatasetError
        template has ended       ─► another one, with other workers
    close ─► the template is killed, and its workers end with it

A minibatch is the same whichever worker makes it: records that draw are seeded each by itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import LifoQueue
from threading import Lock
from typing import Any

from trainer_agent.data.shard import ReadyShard, Shard
from trainer_agent.reading.messages import Asked, Begin, Ended, Setup
from trainer_agent.reading.parcel import Parcel, receive, send
from trireme_shared.platform.membership.life_sign import processor_use
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.errors import DatasetError, ResourceExhausted, TriremeError

TRIES = 2  # a worker may have been killed for the memory of others
FROZEN_S = 10.0
LOOK_S = 0.5
LEAST_START_S = 60.0  # loading torch takes seconds, on a busy machine more
CONTROL_S = 10.0  # the template only forks and waits
NAMED = 8
log = telemetry.logger("reading")


class WorkerEnded(Exception):
    """The process that was asked has ended, or was ended because it was silent. `how`: in words."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class _Worker:
    def __init__(self, number: int) -> None:
        self.number = number
        self.pid = 0
        self.connection: socket.socket | None = None

    def drop(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection, self.pid = None, 0


class ReadingProcesses:
    """`limit_s`: no minibatch takes longer, nor, beyond LEAST_START_S, does making the datasets. `frozen_s`:
    a worker that somebody has stopped (SIGSTOP) is ended after so long. `told`: sentences for the user."""

    def __init__(self, setup: Setup, limit_s: float, frozen_s: float = FROZEN_S) -> None:
        self._setup, self._limit_s, self._frozen_s = setup, limit_s, frozen_s
        self.told = deque[str]()
        #: What the DataLoader that is trained says of the job's settings, once `begun`.
        self.settings: dict[str, Any] = {}
        self._count = count = setup.spec.data_workers
        self._threads = ThreadPoolExecutor(count, "reading")
        self._lock = Lock()
        self._template: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False
        self._started: Future[None] | None = None
        self._workers = [_Worker(number) for number in range(count)]
        self._free: LifoQueue[_Worker] = LifoQueue()
        for worker in reversed(self._workers):
            self._free.put(worker)

    def __repr__(self) -> str:
        return f"<ReadingProcesses {self.pids}>"

    @property
    def pids(self) -> list[int]:
        """Of the workers that live."""
        return [worker.pid for worker in self._workers if worker.pid]

    @property
    def count(self) -> int:
        return self._count

    def begin(self) -> None:
        """Make the datasets, and start all workers, in a thread."""
        self._started = self._threads.submit(self._start)

    async def begun(self) -> None:
        """Until `begin` is done. Raises as `read`, which tries it again."""
        if self._started is not None:
            await asyncio.wrap_future(self._started)

    async def read(self, asked: Asked) -> Shard:
        """A minibatch. Raises DatasetError, and ResourceExhausted and StorageUnreachable: the same read may
        succeed later."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._read, asked)

    def close(self) -> None:
        """Blocks until no process and no thread is left."""
        self._closed = True
        with self._lock:
            self._end_template()
        self._threads.shutdown()
        for worker in self._workers:
            worker.drop()

    # ------------------------------------------------------------ in a thread

    def _start(self) -> None:
        for worker in self._workers:
            self._begin(worker)

    def _read(self, asked: Asked) -> Shard:
        worker, hows = self._free.get(), []
        try:
            for _ in range(TRIES):
                try:
                    self._begin(worker)
                    assert worker.connection is not None
                    send(worker.connection, asked)
                    parcel, _ = receive(worker.connection, self._watch(worker))
                    return self._answer(parcel, asked)
                except (WorkerEnded, EOFError, ConnectionError) as error:
                    how = error.how if isinstance(error, WorkerEnded) else self._how_ended(worker)
                    worker.drop()
                    if self._closed:
                        break
                    log.warning("reading_process_ended", worker=worker.number, cause=how, of=_named(asked))
                    self.told.append(
                        f"reading process {worker.number} of {self._count} {how}, while it read "
                        f"{_named(asked)}; another one takes its place"
                    )
                    hows.append(how)
        finally:
            self._free.put(worker)
        msg = f"{_named(asked)} cannot be read: the process that read them {', the next one '.join(hows)}"
        hint = "correct the code or the record that ends it; with data_workers = 0 it is read in the trainer"
        raise DatasetError(msg, hint=hint, url=asked.file)

    def _answer(self, parcel: Parcel, asked: Asked) -> Shard:
        if parcel.records >= 0:
            return ReadyShard(parcel.records, parcel.opened)
        try:
            found = parcel.opened()
        except Exception as error:
            msg = f"{_named(asked)} cannot be received: {type(error).__name__}: {error}"
            hint = "define the classes of items at the top of a module, or set data_workers = 0"
            raise DatasetError(msg, hint=hint, fatal=True, url=asked.file) from error
        if isinstance(found, TriremeError):
            raise found
        assert isinstance(found, Shard)
        return found

    def _watch(self, worker: _Worker) -> Callable[[], None]:
        """Raises WorkerEnded once the worker has been silent for too long."""
        began = clock.monotonic()
        stopped_since: float | None = None

        def check() -> None:
            nonlocal stopped_since
            now = clock.monotonic()
            use = processor_use(worker.pid)
            stopped_since = (stopped_since or now) if use is not None and use.stopped else None
            frozen = stopped_since is not None and now - stopped_since >= self._frozen_s
            if not frozen and now - began < self._limit_s:
                return
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
            self._how_ended(worker)
            if frozen:
                raise WorkerEnded(f"was frozen (SIGSTOP) for {self._frozen_s:g} s")
            raise WorkerEnded(f"took longer than {self._limit_s:g} s (task_timeout_ceiling_s)")

        return check

    def _begin(self, worker: _Worker) -> None:
        """Start it, unless it is there. Raises DatasetError if the datasets cannot be made, ResourceExhausted
        if the system has no process for it."""
        with self._lock:
            if worker.connection is not None:
                return
            if self._closed:
                raise WorkerEnded("was ended with its trainer")
            ours, theirs = socket.socketpair()
            try:
                pid = self._asked_of_template(Begin(worker.number), [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
        if isinstance(pid, OSError):
            ours.close()
            raise ResourceExhausted(f"no process that reads can be started: {pid}", hint="see ulimit -u")
        ours.settimeout(LOOK_S)
        worker.pid, worker.connection = pid, ours

    def _asked_of_template(self, message: object, descriptors: Sequence[int] = ()) -> Any:
        """Its answer; of another one, if it has ended or is frozen."""
        try:
            return self._exchanged(self._living_template(), message, descriptors, CONTROL_S)
        except (EOFError, ConnectionError, TimeoutError):
            log.warning("reading_template_ended")
            self._end_template()
            return self._exchanged(self._living_template(), message, descriptors, CONTROL_S)

    @staticmethod
    def _exchanged(
        control: socket.socket, message: object, descriptors: Sequence[int], limit_s: float
    ) -> Any:
        def over() -> None:
            raise TimeoutError

        control.settimeout(limit_s)
        send(control, message, descriptors=descriptors)
        return receive(control, over)[0].opened()

    def _living_template(self) -> socket.socket:
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair()
        limit_s = max(self._limit_s, LEAST_START_S)
        with theirs:
            command = [sys.executable, "-m", "trainer_agent.reading", str(theirs.fileno())]
            self._template = subprocess.Popen(  # noqa: S603  our own program
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        self._control = ours
        try:
            made = self._exchanged(ours, self._setup, (), limit_s)
        except (EOFError, ConnectionError, TimeoutError) as error:
            how = f"took longer than {limit_s:g} s (task_timeout_ceiling_s)"
            if not isinstance(error, TimeoutError):
                how = _how(self._template.wait())
            self._end_template()
            name = self._setup.script.name
            msg = f"the process that makes the datasets of {name} for data_workers {how}"
            raise DatasetError(msg, hint="correct dataset(), or set data_workers = 0") from error
        if isinstance(made, TriremeError):
            self._end_template()
            raise made
        self.settings = made
        return ours

    def _end_template(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._template is not None:
            self._template.kill()
            self._template.wait()
        self._template = self._control = None

    def _how_ended(self, worker: _Worker) -> str:
        """In words; the template is not started again for it."""
        with self._lock:
            try:
                control = self._control
                status = self._exchanged(control, Ended(worker.pid), (), CONTROL_S) if control else None
            except (EOFError, ConnectionError, TimeoutError):
                self._end_template()
                status = None
        return "has ended" if status is None else _how(os.waitstatus_to_exitcode(status))


def _how(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (out of memory?)"
    return f"crashed with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _named(asked: Asked) -> str:
    """`records 3, 5, 9 and 13 more of script:dataset`."""
    numbers = sorted(asked.numbers)
    more = f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
    return f"records {', '.join(map(str, numbers[:NAMED]))}{more} of {asked.file}"

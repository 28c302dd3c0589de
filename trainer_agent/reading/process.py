"""The processes that read for a trainer: python -m trainer_agent.reading DESCRIPTOR

    trainer ── starts ──► template: loads the script, makes its datasets, waits
                             └─ forks ──► worker 0, worker 1, ...: records ─► collated ─► trainer

Workers share the memory of the datasets with the template, and a new worker is there at once. The template
has one thread, and runs no code of the script after its datasets are made, so it can fork at any time. It
ends when its trainer has gone, however that was; workers end with the template.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from functools import partial
from typing import Any, Never

import numpy as np
import torch
import torch.utils.data._utils.worker as of_torch

from trainer_agent.data import Blaming, default_collate, open_dataset
from trainer_agent.data.in_code import reading
from trainer_agent.data.shard import ItemShard, Minibatch, Shard
from trainer_agent.reading.messages import Asked, Begin, Ended, Setup
from trainer_agent.reading.parcel import receive, send
from trainer_agent.script.user_module import load, traceback_of
from trireme_shared.datasets.random_state import Generators, seed_everything, undisturbed
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.runtime.process_setup import die_with
from trireme_shared.protocol.errors import DatasetError, TriremeError, is_interrupt
from trireme_shared.protocol.metrics import collected
from trireme_shared.protocol.records.datasets import MapStyle

END_S = 2.0  # a process that has closed its socket ends within it
HINT = "a process reads for the trainer: give values that pickle can send, of classes at the top of a module"


class Reads:
    """What the template has made, and every worker reads."""

    def __init__(self, setup: Setup) -> None:
        """Raises TriremeError."""
        self._spec = setup.spec
        module = load(setup.script)
        self._by_columns = not module.has("collate")
        self._collate = default_collate if self._by_columns else partial(module.call, "collate")
        self._readers: dict[bool, Blaming] = {}
        self._collates = True  # here, not in the trainer
        for held_out, dataset in ((False, setup.spec.dataset), (True, setup.spec.evaluation_dataset)):
            if isinstance(dataset, MapStyle):
                self._readers[held_out] = reader = open_dataset(
                    dataset, setup.spec.seed, named=self._by_columns
                )
                reader.read(dataset.reader, 0, 0)

    @property
    def settings(self) -> dict[str, Any]:
        """What the DataLoader of the dataset that is trained says of the job's settings."""
        taken = self._readers[False].taken if False in self._readers else None
        return {} if taken is None else dict(taken.settings)

    def begin(self, number: int) -> None:
        """This process is worker `number` from now on: what a worker of a DataLoader does first. Raises
        DatasetError."""
        reader = self._readers.get(False) or self._readers[True]
        taken = reader.taken
        items: Any = taken.items if taken is not None else None
        count = self._spec.data_workers
        of_torch._worker_info = of_torch.WorkerInfo(  # noqa: SLF001  torch has no other way
            id=number, num_workers=count, seed=self._spec.seed, dataset=items
        )
        if taken is None or taken.begin_worker is None:
            return
        with undisturbed():
            seed_everything(self._spec.seed)
            try:
                taken.begin_worker(number)
            except BaseException as error:  # the user's code may raise anything
                if is_interrupt(error):
                    raise
                msg = f"worker_init_fn failed in worker {number}: {type(error).__name__}: {error}"
                raise DatasetError(msg, hint="correct it", fatal=True) from error

    def read(self, asked: Asked) -> tuple[object, int]:
        """A batch and the number of its records; or a Shard, if the trainer has to collate, and -1. Raises
        TriremeError."""
        shard = self._shard(asked)
        if self._collates:
            batch = self._batch(shard.minibatch(np.arange(len(shard))))
            if batch is not _NONE:
                return batch, len(shard)
            self._collates = False
            shard = self._shard(asked)  # collate may have changed its records
        if isinstance(shard, ItemShard):
            shard.collate = None  # perhaps a lambda; the trainer has it
        return shard, -1

    def _shard(self, asked: Asked) -> Shard:
        with reading(asked.epoch):
            shard = self._readers[asked.held_out].chosen(asked.file, asked.numbers, asked.stamp)
        if self._by_columns:
            shard.keep_columns()
        return shard

    def _batch(self, records: Minibatch) -> Any:
        """_NONE: it draws random numbers, which are those of its step, or it logs, or it fails: that is done,
        and told, where the minibatch is computed."""
        # else torch collates into files of /dev/shm
        info, of_torch._worker_info = of_torch._worker_info, None  # noqa: SLF001
        try:
            with undisturbed(), collected() as logged:
                before = Generators.now()
                batch = self._collate(records)
                return _NONE if logged or before.differs() else batch
        except BaseException as error:  # the user's code may raise anything
            if is_interrupt(error):
                raise
            return _NONE
        finally:
            of_torch._worker_info = info  # noqa: SLF001


_NONE = object()


def serve_template(control: socket.socket) -> None:
    """Until the trainer has gone."""
    setup = receive(control)[0].opened()
    torch.set_num_threads(1)
    reads: Reads | None = None
    try:
        reads = Reads(setup)
        send(control, reads.settings)
    except BaseException as error:  # the user's code may raise anything
        if is_interrupt(error):
            raise
        send(control, _told(error, setup))
    while True:
        parcel, given = receive(control)
        match parcel.opened():
            case Begin(number) if reads is not None:
                _fork(control, given[0], number, reads, setup)
            case Ended(pid):
                send(control, _end_of(pid))


def _fork(control: socket.socket, descriptor: int, number: int, reads: Reads, setup: Setup) -> None:
    template = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(descriptor)
        send(control, error)
        return
    if not pid:
        control.close()
        _end(lambda: _serve_worker(socket.socket(fileno=descriptor), template, number, reads, setup))
    os.close(descriptor)
    send(control, pid)


def _serve_worker(connection: socket.socket, template: int, number: int, reads: Reads, setup: Setup) -> None:
    """Until the trainer has closed the socket."""
    die_with(template)
    failed: TriremeError | None = None
    try:
        reads.begin(number)
    except TriremeError as error:
        failed = _told(error, setup)
    while True:
        asked = receive(connection)[0].opened()
        if failed is not None:
            send(connection, failed)
            continue
        try:
            found, records = reads.read(asked)
        except TriremeError as error:
            send(connection, _told(error, setup))
            continue
        try:
            send(connection, found, records)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001  objects of the user say how they are pickled
            what = f"{asked.file} record {asked.numbers[0]} and others of its minibatch"
            msg = f"{what} cannot be sent: {type(error).__name__}: {error}"
            send(connection, DatasetError(msg, hint=f"{HINT}; or set data_workers = 0", fatal=True))


def _told(error: BaseException, setup: Setup) -> TriremeError:
    """`error` as the trainer gets it, with the traceback that only this process has."""
    folder = setup.script.parent
    if not isinstance(error, TriremeError):
        msg = f"a process that reads failed: {type(error).__name__}: {error}"
        return DatasetError(msg, hint="set data_workers = 0", traceback=traceback_of(error, folder))
    if error.__cause__ is not None:
        error.details.setdefault("traceback", traceback_of(error.__cause__, folder))
    return error


def _end_of(pid: int) -> int | None:
    """The status of a worker as os.waitpid gives it; None: it lives on, or is no worker."""
    until = clock.monotonic() + END_S
    with suppress(ChildProcessError):
        while True:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return status
            if clock.monotonic() > until:
                return None
            clock.sleep(0.01)
    return None


def _end(serve: Any) -> Never:
    """Run `serve` and end, without what an interpreter does at its end: that is for the parent."""
    code = 1
    try:
        serve()
    except (EOFError, ConnectionError):
        code = 0  # the trainer has gone
    except BaseException:  # noqa: BLE001  as an interpreter does
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer
    control = socket.socket(fileno=int(sys.argv[1]))
    _end(lambda: serve_template(control))

"""Ctrl-C (or SIGTERM, or a closed terminal) at `trireme run`.

first: make a checkpoint, for at most CHECKPOINT_S -> cancel the run, which stops its children in order
second: kill every child at once

A run that gives up because of one member makes a checkpoint first, too: the others may have trained for hours
since the last one.

A closed terminal is SIGHUP, and what is still written to it goes nowhere: a write would fail, and whoever
says that it stops would not stop.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from trireme.launch.cluster import LocalCluster
from trireme.view.job_address import wait_for_operation
from trireme.view.progress import say
from trireme_shared.platform.runtime import ids
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.records.checkpoints import saved_point

CHECKPOINT_S = 30.0
MASTER_S = 2.0
OUTPUTS = (1, 2)


class Terminal:
    """Where this process writes, as far as it is a terminal."""

    def __init__(self) -> None:
        self._outputs = [output for output in OUTPUTS if os.isatty(output)]

    def silence_if_closed(self) -> None:
        closed = [output for output in self._outputs if not os.isatty(output)]
        if not closed:
            return
        nothing = os.open(os.devnull, os.O_WRONLY)
        for output in closed:
            os.dup2(nothing, output)
        os.close(nothing)


@contextmanager
def hangup(stop: Callable[[], None]) -> Iterator[None]:
    """Within it the first SIGHUP calls `stop`; the shell and the system each send one. Where it is ignored
    (nohup) it stays so."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        yield
        return
    count = 0

    def on_signal() -> None:
        nonlocal count
        count += 1
        if count == 1:
            stop()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, on_signal)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


class InterruptHandler:
    """`cluster`: its children are killed by a second Ctrl-C. `ready`: the cluster has started, so a
    checkpoint can be tried."""

    def __init__(self) -> None:
        self.cluster: LocalCluster | None = None
        self.ready = False
        self.say: Callable[[str], None] = say
        self.count = 0
        self._run = asyncio.current_task()
        self._handling, self._terminal = ExitStack(), Terminal()

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.on_signal)
        self._handling.enter_context(hangup(self._on_hangup))

    def __exit__(self, *_: object) -> None:
        self._handling.close()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)

    def on_signal(self) -> None:
        self.count += 1
        self._terminal.silence_if_closed()
        if self.count == 1 and self.cluster is not None and self.ready and self.cluster.is_training:
            self.say(
                f"saving a checkpoint before stopping (at most {CHECKPOINT_S:g} s); interrupt "
                "again to stop at once"
            )
            self.cluster.run_beside(partial(self._save_and_stop, self.cluster), "saving before it stops")
            return
        if self.count == 1:
            self.say("stopping; interrupt again to stop at once")
        elif self.cluster is not None:
            self.cluster.kill_all()
        self._stop()

    def _on_hangup(self) -> None:
        """No second Ctrl-C: a checkpoint under way is saved."""
        if not self.count:
            self.on_signal()

    async def save_before_giving_up(self, cluster: LocalCluster) -> None:
        """The run cannot go on. What the others have trained is saved, if there is somebody who can."""
        if cluster.is_training and cluster.can_save:
            self.say(f"the run cannot go on: saving a checkpoint first (at most {CHECKPOINT_S:g} s)")
            await self._save(cluster, "the run gives up")

    async def _save_and_stop(self, cluster: LocalCluster) -> None:
        await self._save(cluster, "Ctrl-C")
        self._stop()

    async def _save(self, cluster: LocalCluster, cause: str) -> None:
        try:
            async with asyncio.timeout(CHECKPOINT_S):
                await cluster.directory.wait_for(
                    lambda view: cluster.masterless or view.master is not None, CHECKPOINT_S, "a master"
                )
                async with cluster.client(MASTER_S) as (client, job):
                    key = ids.new_id("interrupt")
                    operation = await client.create_checkpoint(
                        job, key=key, cause=cause, limit_s=CHECKPOINT_S
                    )
                done = await wait_for_operation(
                    lambda: cluster.client(MASTER_S), operation, CHECKPOINT_S, lambda _: None
                )
            self.say(f"saved {saved_point(cluster.spec.mode, done.step or 0)}; stopping")
        except (TriremeError, TimeoutError) as error:
            why = str(error) or f"not within {CHECKPOINT_S:g} s"
            self.say(f"no checkpoint was saved ({why}); the job can resume from the one before; stopping")

    def _stop(self) -> None:
        if self._run is not None:
            self._run.cancel()


def resume_command() -> str:
    """The command that resumes this run."""
    return shlex.join(["trireme", *(argument for argument in sys.argv[1:] if argument != "--fresh")])

"""A collective job whose trainers do to themselves what a schedule says, at exact moments; it must end with
the bits of an undisturbed one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.moments.schedule import Fault
from tests.soak.plan import LEASE_S
from tests.soak.run import ALIVE_S, Run, SoakError, Trained, until
from tests.soak.workload import Workload
from trireme.cli.chaos import alive
from trireme_shared.protocol.records import Strategy

TRAINERS = 4
STEPS_PER_FAULT = 40
SLOWLY_S = 0.1
STOPPED_S = 1.75 * LEASE_S
POLL_S = 0.05
IDLE_S = 6.0  # nothing was due for so long: whoever waits for a trainer that joins gets one
LIMIT_S = 60.0  # for one fault


def epochs_for(faults: Sequence[Fault], workload: Workload) -> int:
    steps = max((fault.step for fault in faults), default=0) + STEPS_PER_FAULT * (len(faults) + 1)
    return -(-steps // workload.steps_per_epoch)


@dataclass
class Soak:
    """In `folder`. `say` gets a line for each fault."""

    folder: Path
    faults: Sequence[Fault]
    workload: Workload
    transport: str
    say: Callable[[str], None]
    _woken: list[asyncio.Task[None]] = field(default_factory=list)

    async def run(self, epochs: int) -> Trained:
        """Raises SoakError."""
        marks = self.folder / "marks"
        marks.mkdir(parents=True)
        environment = {"MOMENTS": ",".join(map(str, self.faults)), "MARKS": str(marks)}
        options = {"strategy": Strategy.COLLECTIVE, "workload": self.workload, "transport": self.transport}
        members = {"trainers": TRAINERS, "pservers": 0, "standbys": 0, "spares": 0}
        run = Run(self.folder / "job", epochs, **members, **options, environment=environment)
        with run.cleaned_up():
            run.slow_down(SLOWLY_S)
            run.start()
            await self._all_done(run, marks)
            for waking in self._woken:
                await waking
            run.slow_down(0)
            return await run.end()

    async def _all_done(self, run: Run, marks: Path) -> None:
        began = last = time.monotonic()
        missing, helped = {str(fault): fault for fault in self.faults}, False
        while missing:
            run.check()
            for path in [path for path in marks.iterdir() if path.name in missing]:
                if not (text := path.read_text()):
                    continue  # it is being written
                fault, pid = missing.pop(path.name), int(text.split()[0])
                last, helped = time.monotonic(), False
                self.say(f"{last - began:6.1f} s  step {text.split()[2]:>4}  {fault}")
                await self._done(run, fault, pid)
            waited = time.monotonic() - last
            if waited > IDLE_S and not helped:
                helped = self._help(run, list(missing.values()))
            if waited > LIMIT_S:
                raise SoakError(f"not reached within {LIMIT_S:g} s: {', '.join(missing)}\n{run.tail()}")
            await asyncio.sleep(POLL_S)

    async def _done(self, run: Run, fault: Fault, pid: int) -> None:
        if fault.kind == "stop":
            self._woken.append(asyncio.create_task(_wake(pid)))
        elif fault.kind == "lost":
            await until(lambda: "etcd" in alive(run.folder), ALIVE_S, "etcd to run", run.check)
            os.kill(alive(run.folder)["etcd"], signal.SIGKILL)

    def _help(self, run: Run, missing: Sequence[Fault]) -> bool:
        """Kill a trainer, so that another one joins in its place: only that is waited for."""
        if any(fault.operation not in ("join", "give", "form") for fault in missing):
            return False
        fault = missing[0]
        number = fault.member if fault.operation == "join" else (fault.member + 1) % TRAINERS
        with contextlib.suppress(KeyError, ProcessLookupError):
            os.kill(alive(run.folder)[f"trainer-{number}"], signal.SIGKILL)
            self.say(f"          trainer-{number} is killed, so that one joins: {fault} waits for that")
            return True
        return False


async def _wake(pid: int) -> None:
    await asyncio.sleep(STOPPED_S)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)

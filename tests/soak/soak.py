"""A job of real processes that is broken again and again, and must end with the bits of one that was left alone.

`trireme run` --fault--> the next committed step --pause--> fault ... --brake off--> COMPLETED --> compare
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from examples.charlm import corpus
from shared.errors import TriremeError
from tests.soak.job import fingerprint
from tests.soak.plan import PSERVERS, STANDBYS, TRAINERS, Fault, Kind, plan
from trireme.cli.chaos import alive
from trireme.cli.doctor import MASTER_TTL_S
from trireme.cli.job_probe import JobProbe
from trireme.cli.receipt import Before, Receipt, measure, observe

JOB = "soak"
BATCH, CONTEXT, TEXT_BYTES = 8, 128, 1 << 15
STEPS_PER_EPOCH = TEXT_BYTES // CONTEXT // BATCH
STEPS_PER_FAULT = 8
SLOWLY_S, VERY_SLOWLY_S = 0.03, 0.4  # a minibatch longer, so that the job does not end before the faults do
LEASE_S = 2.0
ALIVE_S = 60.0
END_S = 300.0
POLL_S = 0.05


class SoakError(AssertionError):
    """The job ended too early, or not at all, or with something else than it should have."""


@dataclass(frozen=True)
class Trained:
    """What a job left: the exported parameters, its own summary; the records it had (`windows`) and how often each was
    computed."""

    parameters: Mapping[str, torch.Tensor]
    summary: Mapping[str, Any]
    windows: Counter[str]
    computed: Counter[str]


class Run:
    """One `trireme run` in `folder`; `start` again goes on with it."""

    def __init__(
        self,
        folder: Path,
        epochs: int,
        *,
        trainers: int,
        pservers: int,
        standbys: int,
        spares: int,
        transport: str = "auto",
    ) -> None:
        self.folder = folder / JOB
        self._transport = transport
        self._brake = folder / "brake"
        self._epochs = epochs
        self._place = folder
        self._members = {"trainers": trainers, "pservers": pservers, "standbys": standbys, "spare-pservers": spares}
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "tally").mkdir(parents=True)
        _write_text(folder.parent / "text")

    def start(self) -> None:
        settings = {"checkpoint_every_steps": 5, "lease_ttl_s": LEASE_S, "records_per_task": 16}
        flags = {"job": JOB, "data-dir": self._place, "epochs": self._epochs, "global-batch-size": BATCH}
        command = [sys.executable, "-m", "trireme", "run", Path(__file__).with_name("job.py"), "--no-check", "--json"]
        command += [word for name, value in (flags | self._members).items() for word in (f"--{name}", value)]
        command += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TRIREME_")}
        environment = clean | {
            "TRIREME_TRANSPORT": self._transport,
            "SOAK_BRAKE": str(self._brake),
            "SOAK_TALLY": str(self._place / "tally"),
            "CHARLM_DATA": str(self._place.parent / "text"),
        }
        with (self._place / "out").open("wb") as out, (self._place / "err").open("ab") as err:
            self._process = subprocess.Popen(
                list(map(str, command)),
                env=environment,
                cwd=Path(__file__).parents[2],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def kill_everything(self) -> None:
        """The launcher and all its children, as a power cut would."""
        assert self._process is not None
        launcher = psutil.Process(self._process.pid)
        family = [launcher, *launcher.children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        psutil.wait_procs(family, timeout=10)
        (self.folder / "run.json").unlink(missing_ok=True)

    def slow_down(self, seconds: float) -> None:
        """Each minibatch takes so much longer."""
        temporary = self._brake.with_suffix(".new")
        temporary.write_text(str(seconds))
        temporary.replace(self._brake)

    def check(self) -> None:
        """Raises SoakError if the launcher has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise SoakError(f"the job ended too early:\n{self.tail()}")

    async def end(self) -> Trained:
        assert self._process is not None
        await until(
            lambda: self._process is None or self._process.poll() is not None, END_S, "the job's end", lambda: None
        )
        if self._process.returncode != 0:
            raise SoakError(f"the job failed with exit code {self._process.returncode}:\n{self.tail()}")
        summary = json.loads((self._place / "out").read_text())
        parameters = torch.load(summary["exports"]["state_dict"], weights_only=True)
        return Trained(parameters, summary, _windows(self._place.parent / "text"), _computed(self._place / "tally"))

    def tail(self) -> str:
        return "\n".join((self._place / "err").read_text(errors="replace").splitlines()[-30:])

    @contextmanager
    def cleaned_up(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._process is not None and self._process.poll() is None:
                self.kill_everything()


async def until(holds: Callable[[], object], limit_s: float, what: str, check: Callable[[], None]) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        check()
        if time.monotonic() > deadline:
            raise SoakError(f"waited {limit_s:g} s for {what}")
        await asyncio.sleep(POLL_S)


async def undisturbed(folder: Path, epochs: int) -> Trained:
    run = Run(folder, epochs, trainers=1, pservers=1, standbys=0, spares=0)
    with run.cleaned_up():
        run.start()
        return await run.end()


def epochs_for(faults: int) -> int:
    return -(-STEPS_PER_FAULT * (faults + 1) // STEPS_PER_EPOCH)


async def disturbed(
    folder: Path, epochs: int, seed: int, faults: int, say: Callable[[str], None], transport: str = "auto"
) -> tuple[Trained, list[Receipt]]:
    """Raises SoakError, DeadlineExceeded if the job does not get over a fault. `transport`: see TRIREME_TRANSPORT."""
    members = {"trainers": TRAINERS, "pservers": PSERVERS, "standbys": STANDBYS, "spares": seed % 2}
    run = Run(folder, epochs, **members, transport=transport)
    receipts = []
    with run.cleaned_up():
        run.slow_down(SLOWLY_S)
        run.start()
        await _steps(run)
        since = time.monotonic()
        for number, fault in enumerate(plan(seed, faults), 1):
            await asyncio.sleep(fault.after_s)
            at = time.monotonic() - since
            try:
                receipt = await _inflict(run, fault)
            except TriremeError as error:
                raise SoakError(f"seed {seed}, fault {number} ({fault}): {error}\n{run.tail()}") from error
            say(f"{number:3}/{faults}  {at:6.1f} s  {fault!s:<32}{_cost(receipt)}")
            receipts.append(receipt)
            due = epochs * STEPS_PER_EPOCH * number / (faults + 1)
            early = (receipt.next_step or 0) > due - STEPS_PER_FAULT  # steps go on before the next fault
            run.slow_down(VERY_SLOWLY_S if early else SLOWLY_S)
        run.slow_down(0)
        return await run.end(), receipts


async def _steps(run: Run) -> None:
    """Until the first step is committed."""
    await until((run.folder / "run.json").exists, ALIVE_S, "a master", run.check)
    async with JobProbe(run.folder) as probe:
        deadline = time.monotonic() + ALIVE_S
        while (await probe.versions() or (0, 0))[0] < 1:
            run.check()
            if time.monotonic() > deadline:
                raise SoakError(f"no step was committed {ALIVE_S:g} s after the start:\n{run.tail()}")
            await asyncio.sleep(POLL_S)


async def _inflict(run: Run, fault: Fault) -> Receipt:
    if fault.kind is Kind.EVERYTHING:
        async with JobProbe(run.folder) as probe:
            before = await observe(probe)
        run.kill_everything()
        return await _start_again(run, before)
    names = fault.victims
    await until(lambda: alive(run.folder).keys() >= set(names), ALIVE_S, f"{names} to run", run.check)
    victims = {name: pid for name, pid in alive(run.folder).items() if name in names}
    if fault.kind is Kind.FREEZE:
        run.slow_down(VERY_SLOWLY_S)  # the job goes on before the frozen one does
    async with JobProbe(run.folder) as probe:
        before = await observe(probe)
        async with asyncio.TaskGroup() as group:
            group.create_task(_strike(victims, freeze=fault.kind is Kind.FREEZE))
            receipt = group.create_task(measure(probe, before, victims))
    run.check()
    return receipt.result()


async def _strike(victims: Mapping[str, int], *, freeze: bool) -> None:
    for pid in victims.values():
        os.kill(pid, signal.SIGSTOP if freeze else signal.SIGKILL)
    if freeze:
        await asyncio.sleep(2 * (MASTER_TTL_S if any(name.startswith("master") for name in victims) else LEASE_S))
        for pid in victims.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def _start_again(run: Run, before: Before) -> Receipt:
    run.start()
    await until((run.folder / "run.json").exists, ALIVE_S, "a master", run.check)
    async with JobProbe(run.folder) as probe:
        receipt = await measure(probe, before, {"everything": 0})
    return replace(receipt, noticed="the same command was run again", noticed_s=0.0)


def _cost(receipt: Receipt) -> str:
    noticed = receipt.noticed if receipt.noticed_s is None else f"{receipt.noticed_s:.2f} s: {receipt.noticed}"
    step = (
        "no more steps"
        if receipt.next_step_s is None
        else f"step {receipt.next_step} after {receipt.next_step_s:.2f} s"
    )
    back = (
        ""
        if receipt.rolled_back_to is None
        else f", back to {receipt.rolled_back_to}, {receipt.records_replayed} again"
    )
    return f"{step}{back}  [{noticed}]"


def verify(left_alone: Trained, broken: Trained, receipts: list[Receipt], epochs: int) -> None:
    """Raises SoakError unless not a bit and not a record differs.

    The undisturbed run computed each record exactly once an epoch. The other one may have computed some more often (what
    was not committed is computed again), and its equal bits say that each took effect exactly once.
    """
    one, other = left_alone.parameters, broken.parameters
    different = [name for name in one if name not in other or not torch.equal(one[name], other[name])]
    if different or one.keys() != other.keys():
        raise SoakError(f"{len(different)} of {len(one)} parameters differ from the undisturbed run's: {different[:3]}")
    expected = Counter({window: count * epochs for window, count in left_alone.windows.items()})
    if left_alone.computed != expected:
        raise SoakError(
            f"the undisturbed run computed other records: {(left_alone.computed - expected).total()} too many"
        )
    if not broken.computed >= expected:
        raise SoakError(f"{(expected - broken.computed).total()} records were never computed")
    for trained in (left_alone, broken):
        if trained.summary["records"] != expected.total() or trained.summary["discarded"]["records"]:
            raise SoakError(f"expected {expected.total()} records, none discarded: {trained.summary}")
    if lost := [receipt for receipt in receipts if receipt.records_lost]:
        raise SoakError(f"records were lost: {lost}")


def _write_text(folder: Path) -> None:
    """What examples/charlm trains on, cut short."""
    for path in corpus.prepare(folder / "whole").values():
        (folder / path.name).write_bytes(path.read_bytes()[:TEXT_BYTES])


def _windows(folder: Path) -> Counter[str]:
    """Fingerprints of the records, as job.py writes them."""
    text = next(folder.glob("*-train.txt")).read_bytes()
    return Counter(fingerprint(text[first : first + CONTEXT + 1]) for first in range(0, len(text) - CONTEXT, CONTEXT))


def _computed(folder: Path) -> Counter[str]:
    return Counter(line for path in folder.iterdir() for line in path.read_text().splitlines())

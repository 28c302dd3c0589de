"""One fault on a running job, and what it cost.

kill: signal ─► the next step                       everything else: begin ─ its seconds ─► end ─► the next step
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from shared.errors import TriremeError
from tests.soak.isolation import DroppedPackets
from tests.soak.plan import LOSS, Fault, Kind
from tests.soak.run import ALIVE_S, POLL_S, Run, SoakError, until
from trireme.cli.exit_codes import DISK_FULL
from trireme.cli.faults.chaos import alive
from trireme.cli.faults.job_probe import JobProbe
from trireme.cli.faults.receipt import Before, Receipt, measure, observe
from trireme.launch import run_folder

VERY_SLOWLY_S = 0.4  # a minibatch longer, so that the job does not end before the fault does
REFILL_S = 0.05


@dataclass(frozen=True)
class Cost:
    """`receipt`: since the fault began; its step was begun after the fault's end. `versions`: JobProbe.versions afterwards. `note`: what
    else happened. `began`, `ended`: by the monotonic clock."""

    fault: Fault
    receipt: Receipt
    versions: tuple[int, int] | None
    note: str = ""
    began: float = 0.0
    ended: float = 0.0

    @property
    def after_s(self) -> float | None:
        """From the fault's end to the next step."""
        return None if self.receipt.next_step_s is None else max(0.0, self.receipt.next_step_s - self.fault.seconds)

    def __str__(self) -> str:
        receipt = self.receipt
        number = "" if receipt.next_step is None else f" {receipt.next_step}"
        step = "no more steps" if receipt.next_step_s is None else f"step{number} after {receipt.next_step_s:.2f} s"
        if receipt.rolled_back:
            to = "the checkpoint" if receipt.rolled_back_to is None else receipt.rolled_back_to
            step += f", back to {to}, {receipt.records_replayed} again"
        if lost := {name: count for name, count in receipt.updates_lost.items() if count}:
            step += f", lost {lost}"
        noticed = receipt.noticed if receipt.noticed_s is None else f"{receipt.noticed_s:.2f} s: {receipt.noticed}"
        return f"{self.fault!s:<36}{step}  [{'; '.join(filter(None, (noticed, self.note)))}]"


async def inflict(run: Run, fault: Fault) -> Cost:
    """Returns when training goes on. Raises SoakError if it does not."""
    began = time.monotonic()
    try:
        return replace(await _inflict(run, fault), began=began, ended=time.monotonic())
    except TriremeError as error:
        raise SoakError(f"{error}\n{run.tail()}") from error


async def _inflict(run: Run, fault: Fault) -> Cost:
    await until(lambda: alive(run.folder).keys() >= set(fault.victims), ALIVE_S, f"{fault.victims} to run", run.check)
    victims = {name: pid for name, pid in alive(run.folder).items() if name in fault.victims}
    if fault.seconds:
        run.slow_down(VERY_SLOWLY_S)
    async with JobProbe(run.folder) as probe:
        before = await observe(probe)
        if fault.kind is Kind.KILL_EVERYTHING:
            run.kill_everything()
        elif not fault.seconds:
            _send(victims.values(), signal.SIGKILL)
            receipt = await measure(probe, before, victims)
            run.check()
            return Cost(fault, receipt, await probe.versions())
        else:
            note = await _last(run, probe, fault, victims.values())
            # a launcher that gives up takes a while to stop everything, and steps go on without etcd
            settled = lambda: run.exit_code is not None or "etcd" in alive(run.folder)  # noqa: E731
            await until(settled, ALIVE_S, "etcd to run, or the launcher's end", lambda: None)
            since_its_end = replace(before, versions=None)
            receipt = await _unless_it_ends(run, measure(probe, since_its_end, victims or {fault.kind.value: 0}))
            if receipt is not None:
                return Cost(fault, receipt, await probe.versions(), note)
            if fault.kind is not Kind.FULL_DATA:
                run.check()
            _check_words_about_a_full_disk(run)
    return await _start_again(run, fault, before)


async def _last(run: Run, probe: JobProbe, fault: Fault, pids: Collection[int]) -> str:
    """The fault from its begin to its end; what to say about it."""
    match fault.kind:
        case Kind.CUT_ETCD | Kind.LOSSY_ETCD:
            facts = run_folder.read_json(run.folder / run_folder.RUN_FILE) or {}
            return await _drop_packets(fault, [facts["etcd"]], certain=fault.kind is Kind.CUT_ETCD)
        case Kind.CUT_PSERVERS | Kind.LOSSY_PSERVERS:
            urls = [member.url for member in probe.directory.pservers.values()]
            return await _drop_packets(fault, urls, certain=fault.kind is Kind.CUT_PSERVERS)
        case Kind.FULL_DATA | Kind.FULL_CHECKPOINTS:
            disk = run.disks[0 if fault.kind is Kind.FULL_DATA else 1]
            disk.fill()
            _send(pids, signal.SIGKILL)
            end = time.monotonic() + fault.seconds
            while time.monotonic() < end:
                await asyncio.sleep(REFILL_S)
                disk.fill()  # what somebody has freed
            disk.empty()
            return ""
        case _:
            _send(pids, signal.SIGSTOP)
            await asyncio.sleep(fault.seconds)
            _send(pids, signal.SIGCONT)
            return ""


async def _drop_packets(fault: Fault, urls: Collection[str], *, certain: bool) -> str:
    with DroppedPackets([urlsplit(url).port or 0 for url in urls], 1.0 if certain else LOSS) as dropped:
        await asyncio.sleep(fault.seconds)
    return f"{dropped.count} packets dropped"


def _send(pids: Collection[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


async def _unless_it_ends(run: Run, measuring: asyncio.Future[Receipt]) -> Receipt | None:
    """None: the launcher ended first."""
    task = asyncio.ensure_future(measuring)
    try:
        while not task.done() and run.exit_code is None:
            await asyncio.sleep(POLL_S)
        return task.result() if run.exit_code is None else None
    finally:
        task.cancel()
        await asyncio.wait([task])


def _check_words_about_a_full_disk(run: Run) -> None:
    said = run.said()
    if run.exit_code != DISK_FULL or "Traceback" in said or "error: the disk of" not in said:
        raise SoakError(
            f"a full disk ended the launcher with exit code {run.exit_code}, not {DISK_FULL}, or unclearly:\n{said}"
        )


async def _start_again(run: Run, fault: Fault, before: Before) -> Cost:
    """The same command, after everything has ended."""
    note = f"the launcher ended with exit code {run.exit_code}; the same command was run again"
    (run.folder / run_folder.RUN_FILE).unlink(missing_ok=True)
    run.start()
    await until((run.folder / run_folder.RUN_FILE).exists, ALIVE_S, "a master", run.check)
    async with JobProbe(run.folder) as probe:
        receipt = await measure(probe, before, {"everything": 0})
        return Cost(fault, replace(receipt, noticed=note, noticed_s=0.0), await probe.versions())

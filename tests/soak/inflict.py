"""One fault on a running job, and what it cost.

kill: signal ─► the next step
everything else: begin ─ its seconds ─► end ─► the next step
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from tests.soak.isolation import DroppedPackets
from tests.soak.plan import LOSS, SERVERS, Crew, Fault, Kind
from tests.soak.run import ALIVE_S, POLL_S, Run, SoakError, asked, until
from trireme.cli.chaos import STALL_S as PROBE_STALL_S
from trireme.cli.chaos import Before, JobProbe, Receipt, alive, measure, observe
from trireme.cli.exit_codes import DISK_FULL
from trireme.client import ONLY_JOB
from trireme.launch import run_folder
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.records import Strategy

VERY_SLOWLY_S = 0.4  # a minibatch longer, so that the job does not end before the fault does
SLOWLY_S = 0.03
REFILL_S = 0.05
STALL_S = 0.1  # a frozen trainer says nothing until then
SETTLED_S = 0.6  # minibatches that began slowly are over
WHOLE_S = 90.0
OVERLAPPING_S = 0.5  # a pause shorter than that: the next fault does not wait until all trainers are back


@dataclass(frozen=True)
class Cost:
    """`receipt`: since the fault began; its step was begun after the fault's end. `versions`:
    JobProbe.versions afterwards. `note`: what else happened. `began`, `ended`: by the monotonic clock.
    Collective: `without_s`: from a trainer's long freeze to the others' next step; `whole_s`: from the
    fault's end until as many trainers as desired had all parameters and were counted in."""

    fault: Fault
    receipt: Receipt
    versions: tuple[int, int] | None
    note: str = ""
    began: float = 0.0
    ended: float = 0.0
    without_s: float | None = None
    whole_s: float | None = None

    @property
    def after_s(self) -> float | None:
        """From the fault's end to the next step."""
        return (
            None
            if self.receipt.next_step_s is None
            else max(0.0, self.receipt.next_step_s - self.fault.seconds)
        )

    def __str__(self) -> str:
        receipt = self.receipt
        number = "" if receipt.next_step is None else f" {receipt.next_step}"
        step = (
            "no more steps"
            if receipt.next_step_s is None
            else f"step{number} after {receipt.next_step_s:.2f} s"
        )
        if receipt.rolled_back:
            to = "the checkpoint" if receipt.rolled_back_to is None else receipt.rolled_back_to
            step += f", back to {to}, {receipt.records_replayed} again"
        if lost := {name: count for name, count in receipt.updates_lost.items() if count}:
            step += f", lost {lost}"
        noticed = (
            receipt.noticed if receipt.noticed_s is None else f"{receipt.noticed_s:.2f} s: {receipt.noticed}"
        )
        without = "" if self.without_s is None else f"the others' next step after {self.without_s:.2f} s"
        back = "" if self.whole_s is None else f"all are back after {self.whole_s:.2f} s"
        return f"{self.fault!s:<36} {step}  [{'; '.join(filter(None, (noticed, self.note, without, back)))}]"


async def inflict(run: Run, fault: Fault, crew: Crew = SERVERS) -> Cost:
    """Returns when training goes on. Raises SoakError if it does not."""
    try:
        if run.strategy is not Strategy.COLLECTIVE:
            began = time.monotonic()
            return replace(await _inflict(run, fault, crew.trainers), began=began, ended=time.monotonic())
        run.slow_down(VERY_SLOWLY_S)
        if fault.kind in (Kind.KILL_TRAINER, Kind.FREEZE_LONG, Kind.RESIZE):
            await whole(run, crew.trainers)
        fault = await _of_those_there(run, fault, crew)
        began = time.monotonic()
        cost = replace(await _inflict(run, fault, crew.trainers), began=began, ended=time.monotonic())
        run.slow_down(VERY_SLOWLY_S)
        if fault.after_s > OVERLAPPING_S:
            cost = replace(cost, whole_s=(await whole(run, crew.trainers)) - began - fault.seconds)
        return cost
    except TriremeError as error:
        raise SoakError(f"{error}\n{run.tail()}") from error


async def _of_those_there(run: Run, fault: Fault, crew: Crew) -> Fault:
    """A resize may have made a trainer of another number while the one before it was leaving: it is taken in
    its place."""
    own = set(crew.roles["trainer"]) | crew.spared

    def there() -> dict[str, str] | None:
        running = alive(run.folder).keys()
        gone = [name for name in fault.victims if name not in running]
        others = sorted(name for name in running if name.startswith("trainer") and name not in own)
        return dict(zip(gone, others, strict=False)) if len(gone) <= len(others) else None

    await until(lambda: there() is not None, ALIVE_S, f"{fault.victims} to run", run.check)
    places = there() or {}
    return replace(fault, victims=tuple(places.get(name, name) for name in fault.victims))


async def whole(run: Run, trainers: int) -> float:
    """Until as many trainers have all parameters and are counted in; that moment by the monotonic clock."""
    deadline = time.monotonic() + WHOLE_S
    async with JobProbe(run.folder, STALL_S) as probe:
        while True:
            run.check()
            listed, state = probe.directory.trainers, probe.state
            if (
                len(listed.names) == trainers
                and listed.generation == state.generation
                and await probe.versions()
            ):
                return time.monotonic()
            if time.monotonic() > deadline:
                raise SoakError(
                    f"waited {WHOLE_S:g} s for {trainers} trainers: {listed!r}, {state!r}\n{run.tail()}"
                )
            await asyncio.sleep(POLL_S)


async def _inflict(run: Run, fault: Fault, desired: int) -> Cost:
    await until(
        lambda: alive(run.folder).keys() >= set(fault.victims), ALIVE_S, f"{fault.victims} to run", run.check
    )
    victims = {name: pid for name, pid in alive(run.folder).items() if name in fault.victims}
    if fault.seconds:
        run.slow_down(VERY_SLOWLY_S)
    elif run.strategy is Strategy.COLLECTIVE:
        run.slow_down(SLOWLY_S)
        await asyncio.sleep(SETTLED_S)
    async with JobProbe(
        run.folder, STALL_S if run.strategy is Strategy.COLLECTIVE else PROBE_STALL_S
    ) as probe:
        before = await observe(probe)
        if fault.kind is Kind.KILL_EVERYTHING:
            run.kill_everything()
        elif fault.kind is Kind.KILL_JOINER:
            await _kill_joiner(run, fault, victims)
            return Cost(
                fault, await measure(probe, replace(before, versions=None), victims), await probe.versions()
            )
        elif fault.kind is Kind.RESIZE:
            return await _resize(run, fault, desired, probe, before)
        elif not fault.seconds:
            _send(victims.values(), signal.SIGKILL)
            receipt = await measure(probe, before, victims)
            run.check()
            return Cost(fault, receipt, await probe.versions())
        else:
            without_s, note = None, ""
            if _trainer_is_missed(run, fault):
                without_s = await _freeze_trainer(run, probe, before, fault, victims)
            else:
                note = await _last(run, probe, fault, victims.values())
            # a launcher that gives up takes a while to stop everything, and steps go on without etcd
            settled = lambda: run.exit_code is not None or "etcd" in alive(run.folder)  # noqa: E731
            await until(settled, ALIVE_S, "etcd to run, or the launcher's end", lambda: None)
            since_its_end = replace(before, versions=None)
            receipt = await _unless_it_ends(
                run, measure(probe, since_its_end, victims or {fault.kind.value: 0})
            )
            if receipt is not None:
                return Cost(fault, receipt, await probe.versions(), note, without_s=without_s)
            if fault.kind is not Kind.FULL_DATA:
                run.check()
            _check_words_about_a_full_disk(run)
    return await _start_again(run, fault, before)


def _trainer_is_missed(run: Run, fault: Fault) -> bool:
    """Whether the others go on without it."""
    of_trainer = any(name.startswith("trainer") for name in fault.victims)
    return run.strategy is Strategy.COLLECTIVE and fault.kind is Kind.FREEZE_LONG and of_trainer


async def _freeze_trainer(
    run: Run, probe: JobProbe, before: Before, fault: Fault, victims: Mapping[str, int]
) -> float | None:
    """Longer than its lease; returns the seconds until all others had finished the next step."""
    run.slow_down(SLOWLY_S)
    await asyncio.sleep(SETTLED_S)
    before = await observe(probe)
    _send(victims.values(), signal.SIGSTOP)
    end = time.monotonic() + fault.seconds
    try:
        receipt = await measure(probe, before, victims)
        run.slow_down(VERY_SLOWLY_S)
        await asyncio.sleep(max(0.0, end - time.monotonic()))
    finally:
        _send(victims.values(), signal.SIGCONT)
    return receipt.next_step_s


async def _kill_joiner(run: Run, fault: Fault, victims: Mapping[str, int]) -> None:
    """A trainer, and whoever comes in its place `seconds` after that was started."""
    ((name, pid),) = victims.items()
    _send([pid], signal.SIGKILL)
    follower = lambda: alive(run.folder).get(name, pid)  # noqa: E731
    await until(lambda: follower() != pid, ALIVE_S, f"another {name}", run.check)
    await asyncio.sleep(fault.seconds)
    _send([follower()], signal.SIGKILL)


async def _resize(run: Run, fault: Fault, desired: int, probe: JobProbe, before: Before) -> Cost:
    """To another number of trainers and back to the desired one."""
    times = []
    for number in (fault.trainers, desired):
        began, key = time.monotonic(), f"soak-{time.monotonic_ns()}"
        made = await asked(
            run,
            lambda client, key=key, number=number: client.create_resize(ONLY_JOB, key=key, trainers=number),
        )
        while made.running:
            name = made.operation_id
            made = await asked(
                run, lambda client, name=name: client.get_operation(ONLY_JOB, name, wait_s=1.0)
            )
        times.append(await whole(run, number) - began)
    receipt = await measure(probe, replace(before, versions=None), {f"{desired} trainers": 0})
    note = f"{fault.trainers} trainers after {times[0]:.2f} s, {desired} again after {times[1]:.2f} s"
    return Cost(fault, receipt, await probe.versions(), note)


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
    ports = [port for url in urls if (port := urlsplit(url).port)]
    with DroppedPackets(ports, 1.0 if certain else LOSS) as dropped:
        await asyncio.sleep(fault.seconds)
    if not dropped.count:
        raise SoakError(
            f"no packet was sent to or from {', '.join(urls)} in {fault.seconds:g} s: nothing was cut"
        )
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
            f"a full disk ended the launcher with exit code {run.exit_code}, not {DISK_FULL}, or "
            f"unclearly:\n{said}"
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

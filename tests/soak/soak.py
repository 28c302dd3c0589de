"""A job of real processes that is broken again and again, and must end as one that was left alone.

`trireme run` ─fault─► the next committed step ─pause─► fault ... ─brake off─► COMPLETED ─► verify.py
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.soak.growth import Growth
from tests.soak.inflict import VERY_SLOWLY_S, Cost, inflict
from tests.soak.plan import ANYWHERE, DISKS, PACKETS, SERVERS, Crew, Kind, plan
from tests.soak.run import ALIVE_S, POLL_S, Run, SoakError, Trained, pserver_infos, until
from tests.soak.workload import CHARLM, Workload
from trireme.cli.chaos import JobProbe
from trireme_shared.protocol.records import Mode, Strategy

STEPS_PER_FAULT = 5
STEPS_PER_FAULT_OF_COLLECTIVE = 20  # trainers join meanwhile
SLOWLY_S = 0.03  # a minibatch longer


async def undisturbed(
    folder: Path,
    epochs: int,
    *,
    strategy: Strategy = Strategy.PARAMETER_SERVER,
    workload: Workload = CHARLM,
    trainers: int = 1,
    lanes: int = 4,
) -> Trained:
    options = {"strategy": strategy, "workload": workload, "lanes": lanes}
    run = Run(folder, epochs, trainers=trainers, pservers=1, standbys=0, spares=0, **options)
    with run.cleaned_up():
        run.start()
        return await run.end()


def epochs_for(
    faults: int,
    mode: Mode = Mode.SYNC,
    strategy: Strategy = Strategy.PARAMETER_SERVER,
    workload: Workload = CHARLM,
) -> int:
    """Asynchronous trainers do not wait for each other: a minibatch counts as a step there."""
    steps = _steps_per_fault(strategy) * (faults + 1) * (1 if mode is Mode.SYNC else 3)
    return -(-steps // workload.steps_per_epoch)


def _steps_per_fault(strategy: Strategy) -> int:
    return STEPS_PER_FAULT_OF_COLLECTIVE if strategy is Strategy.COLLECTIVE else STEPS_PER_FAULT


async def disturbed(
    folder: Path,
    epochs: int,
    seed: int,
    faults: int,
    say: Callable[[str], None],
    *,
    transport: str = "auto",
    mode: Mode = Mode.SYNC,
    kinds: Sequence[Kind] = ANYWHERE,
    strategy: Strategy = Strategy.PARAMETER_SERVER,
    workload: Workload = CHARLM,
    crew: Crew = SERVERS,
    exchange: str = "direct",
    growth: Growth | None = None,
) -> tuple[Trained, list[Cost]]:
    """Raises SoakError if the job does not get over a fault. `transport`: see TRIREME_TRANSPORT. `growth`:
    takes a sample after each."""
    members = {
        "trainers": crew.trainers,
        "pservers": crew.pservers,
        "standbys": crew.standbys,
        "spares": seed % 2,
    }
    options = {"transport": transport, "mode": mode, "strategy": strategy, "workload": workload}
    options |= {"environment": {"TRIREME_EXCHANGE": exchange}} if exchange != "direct" else {}
    options |= {"small_disks": bool(DISKS & set(kinds)), "etcd_port": bool(PACKETS & set(kinds))}
    run = Run(folder, epochs, **members, **options)
    costs = []
    with run.cleaned_up():
        run.slow_down(SLOWLY_S)
        run.start()
        unit = await _steps(run)
        since = time.monotonic()
        for number, fault in enumerate(plan(seed, faults, kinds, crew), 1):
            await asyncio.sleep(fault.after_s)
            at = time.monotonic() - since
            try:
                cost = await inflict(run, fault, crew)
            except SoakError as error:
                raise SoakError(
                    f"fault {number} ({fault}), {at:.1f} s after the first step: {error}"
                ) from error
            say(f"{number:3}/{faults}  {at:6.1f} s  {cost}")
            costs.append(cost)
            if growth is not None:
                await growth.sample(run)
            due = epochs * workload.steps_per_epoch * number / (faults + 1)
            # steps go on before the next
            early = max(cost.versions or (0,)) / unit > due - _steps_per_fault(strategy)
            run.slow_down(VERY_SLOWLY_S if early else SLOWLY_S)
        run.slow_down(0)
        return await run.end(), costs


async def _steps(run: Run) -> int:
    """Until the first step is committed. Returns by how much a step of the job moves what JobProbe calls
    versions."""
    await until((run.folder / "run.json").exists, ALIVE_S, "a master", run.check)
    async with JobProbe(run.folder) as probe:
        deadline = time.monotonic() + ALIVE_S
        while (await probe.versions() or (0, 0))[0] < 1:
            run.check()
            if time.monotonic() > deadline:
                raise SoakError(f"no step was committed {ALIVE_S:g} s after the start:\n{run.tail()}")
            await asyncio.sleep(POLL_S)
        return 1 if run.mode is Mode.SYNC else sum(info.blocks for info in await pserver_infos(probe))

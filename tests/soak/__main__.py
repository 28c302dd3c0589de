"""`python -m tests.soak --seed 7 --faults 30` (`make soak`): break a job of real processes that often,
compare every bit."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.soak import isolation
from tests.soak.growth import Growth
from tests.soak.inflict import Cost
from tests.soak.plan import CREWS, DISKS, KINDS, PACKETS, Kind, harmless
from tests.soak.receipts import collective_table, table, write
from tests.soak.run import SoakError, Trained
from tests.soak.soak import disturbed, epochs_for, undisturbed
from tests.soak.verify import check_bits, check_exactly_once, verify
from tests.soak.workload import WORKLOADS
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.records import Mode, Strategy


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument(
        "--seed", type=int, nargs="+", default=[time.time_ns() % 100_000], help="one run for each"
    )
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument(
        "--transport", nargs="+", default=["auto"], help="TRIREME_TRANSPORT; one run for each"
    )
    parser.add_argument("--mode", type=Mode, choices=list(Mode), default=Mode.SYNC)
    parser.add_argument(
        "--strategy", type=Strategy, choices=list(Strategy), default=Strategy.PARAMETER_SERVER
    )
    parser.add_argument(
        "--exchange", choices=["direct", "native"], default="direct", help="of a collective job"
    )
    parser.add_argument("--workload", choices=list(WORKLOADS), default="charlm")
    parser.add_argument(
        "--kinds", type=Kind, choices=list(Kind), nargs="+", help="default: all of the strategy"
    )
    parser.add_argument("--spared", nargs="+", default=[], help="processes that get no signal: do they grow?")
    parser.add_argument(
        "--receipts",
        type=Path,
        help="append what each fault cost to this file, once a run has ended as it should",
    )
    parser.add_argument("--folder", type=Path, help="keep what the runs leave here; must not exist")
    arguments = parser.parse_args()
    telemetry.configure(level="ERROR", json=False)
    asked, known = arguments.kinds, KINDS[arguments.strategy]
    if foreign := [kind for kind in asked or () if kind not in known]:
        parser.error(f"{', '.join(foreign)}: not with {arguments.strategy}, which knows {', '.join(known)}")
    if arguments.exchange == "native" and arguments.strategy is not Strategy.COLLECTIVE:
        parser.error(f"--exchange native needs --strategy collective, and it is {arguments.strategy}")
    arguments.kinds = permitted(asked or known)
    if not arguments.kinds:
        return 2
    folder = (
        arguments.folder.absolute() if arguments.folder else Path(tempfile.mkdtemp(prefix="trireme-soak-"))
    )
    failed = runs(folder, arguments)
    if failed or arguments.folder:
        say(f"what the runs left is in {folder}")
    else:
        shutil.rmtree(folder)
    return bool(failed)


def permitted(kinds: Sequence[Kind]) -> list[Kind]:
    """Without those that need a network or file systems of the soak's own where it may not have them; says
    so."""
    left = list(kinds)
    for group, obstacle in ((PACKETS, isolation.no_packets), (DISKS, isolation.no_disks)):
        if (wanted := [kind for kind in left if kind in group]) and (why := obstacle()):
            left = [kind for kind in left if kind not in group]
            say(f"skipped: {', '.join(wanted)}: {why}")
    if (PACKETS | DISKS) & set(left):
        isolation.enter()
    return left


def reached(kinds: Sequence[Kind], transport: str) -> list[Kind]:
    """Without those that `transport` makes harmless; says so."""
    if skipped := [kind for kind in kinds if kind in harmless(transport)]:
        say(f"skipped: {', '.join(skipped)}: only with --transport tcp do packets go to a parameter server")
    return [kind for kind in kinds if kind not in skipped]


def runs(folder: Path, arguments: argparse.Namespace) -> int:
    """All seeds with all transports; returns how many failed."""
    mode, strategy, workload = arguments.mode, arguments.strategy, WORKLOADS[arguments.workload]
    epochs = epochs_for(arguments.faults, mode, strategy, workload)
    failed, left_alone = 0, None
    begin = time.monotonic()
    if mode is Mode.SYNC:
        try:
            left_alone = asyncio.run(undisturbed(folder / "undisturbed", epochs, workload=workload))
            check_exactly_once(left_alone, epochs)
            say(f"undisturbed: {epochs} epochs in {time.monotonic() - begin:.0f} s")
            if strategy is Strategy.COLLECTIVE:
                alone = asyncio.run(
                    undisturbed(folder / "alone", epochs, strategy=strategy, workload=workload)
                )
                check_exactly_once(alone, epochs)
                check_bits(left_alone, alone, "those of the job with a parameter server")
                say(
                    "one trainer of a collective job, left alone: the bits of the job with a parameter server"
                )
        except SoakError as error:
            say(f"the undisturbed run FAILED: {error}")
            return 1
    all_costs: list[Cost] = []
    for transport in arguments.transport:
        for seed in arguments.seed:
            costs = one(folder / f"{transport}-{seed}", left_alone, epochs, seed, transport, arguments)
            failed += costs is None
            all_costs += costs or []
    if len(arguments.seed) * len(arguments.transport) > 1:
        say(f"all runs: {len(all_costs)} faults, {failed} runs FAILED\n{tables(all_costs, strategy)}")
    return failed


def one(
    folder: Path,
    left_alone: Trained | None,
    epochs: int,
    seed: int,
    transport: str,
    arguments: argparse.Namespace,
) -> list[Cost] | None:
    """One disturbed job; None if it did not end as it should. What a failed one left is kept in `folder`."""
    faults, mode, kinds = arguments.faults, arguments.mode, reached(arguments.kinds, transport)
    if not kinds:
        return None
    strategy, crew = (
        arguments.strategy,
        replace(CREWS[arguments.strategy], spared=frozenset(arguments.spared)),
    )
    again = (
        f"make soak SEED={seed} FAULTS={faults} TRANSPORT={transport} MODE={mode} STRATEGY={strategy} "
        f'EXCHANGE={arguments.exchange} WORKLOAD={arguments.workload} KINDS="{" ".join(kinds)}"'
    )
    say(f"seed {seed}, {faults} faults, {transport}; again: {again}")
    begin = time.monotonic()
    try:
        growth = Growth(crew.trainers)
        options = {"transport": transport, "mode": mode, "kinds": kinds, "strategy": strategy, "crew": crew}
        options |= {
            "workload": WORKLOADS[arguments.workload],
            "growth": growth,
            "exchange": arguments.exchange,
        }
        broken, costs = asyncio.run(disturbed(folder, epochs, seed, faults, say, **options))
        verify(left_alone, broken, costs, epochs)
        if strategy is Strategy.COLLECTIVE:
            growth.check()
    except (SoakError, TriremeError) as error:
        say(f"seed {seed}, {transport} FAILED: {error}\nagain: {again}")
        return None
    if arguments.receipts:
        write(costs, arguments.receipts)
    say(tables(costs, strategy))
    if text := str(growth):
        say(text)
    what = "every bit is the undisturbed run's"
    if mode is Mode.ASYNC:
        what = f"each minibatch was applied once or is on record: {broken.summary['losses']}"
    records = f"each of {broken.windows.total()} records counted once in each of {epochs} epochs"
    say(
        f"seed {seed}, {transport}: {len(costs)} faults in {time.monotonic() - begin:.0f} s; "
        f"{what}, {records}"
    )
    return costs


def tables(costs: Sequence[Cost], strategy: Strategy) -> str:
    return f"{table(costs)}\n{collective_table(costs)}" if strategy is Strategy.COLLECTIVE else table(costs)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

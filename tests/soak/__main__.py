"""`python -m tests.soak --seed 7 --faults 30` (`make soak`): break a job of real processes that often, compare every bit."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from shared.errors import TriremeError
from shared.records import Mode
from shared.runtime import telemetry
from tests.soak import isolation
from tests.soak.inflict import Cost
from tests.soak.plan import DISKS, PACKETS, Kind
from tests.soak.run import SoakError, Trained
from tests.soak.soak import disturbed, epochs_for, undisturbed
from tests.soak.verify import check_exactly_once, verify


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seed", type=int, nargs="+", default=[time.time_ns() % 100_000], help="one run for each")
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--transport", nargs="+", default=["auto"], help="TRIREME_TRANSPORT; one run for each")
    parser.add_argument("--mode", type=Mode, choices=list(Mode), default=Mode.SYNC)
    parser.add_argument("--kinds", type=Kind, choices=list(Kind), nargs="+", default=list(Kind), help="default: all")
    parser.add_argument("--folder", type=Path, help="keep what the runs leave here; must not exist")
    arguments = parser.parse_args()
    telemetry.configure(level="ERROR", json=False)
    arguments.kinds = permitted(arguments.kinds)
    if not arguments.kinds:
        return 2
    folder = arguments.folder.absolute() if arguments.folder else Path(tempfile.mkdtemp(prefix="trireme-soak-"))
    failed = runs(folder, arguments)
    if failed or arguments.folder:
        say(f"what the runs left is in {folder}")
    else:
        shutil.rmtree(folder)
    return bool(failed)


def permitted(kinds: Sequence[Kind]) -> list[Kind]:
    """Without those that need a network or file systems of the soak's own where it may not have them; says so."""
    left = list(kinds)
    for group, obstacle in ((PACKETS, isolation.no_packets), (DISKS, isolation.no_disks)):
        if (wanted := [kind for kind in left if kind in group]) and (why := obstacle()):
            left = [kind for kind in left if kind not in group]
            say(f"skipped: {', '.join(wanted)}: {why}")
    if (PACKETS | DISKS) & set(left):
        isolation.enter()
    return left


def runs(folder: Path, arguments: argparse.Namespace) -> int:
    """All seeds with all transports; returns how many failed."""
    epochs, mode = epochs_for(arguments.faults, arguments.mode), arguments.mode
    failed, left_alone = 0, None
    begin = time.monotonic()
    if mode is Mode.SYNC:
        try:
            left_alone = asyncio.run(undisturbed(folder / "undisturbed", epochs))
            check_exactly_once(left_alone, epochs)
        except SoakError as error:
            say(f"the undisturbed run FAILED: {error}")
            return 1
        say(f"undisturbed: {epochs} epochs in {time.monotonic() - begin:.0f} s")
    for transport in arguments.transport:
        for seed in arguments.seed:
            failed += not one(folder / f"{transport}-{seed}", left_alone, epochs, seed, transport, arguments)
    return failed


def one(
    folder: Path, left_alone: Trained | None, epochs: int, seed: int, transport: str, arguments: argparse.Namespace
) -> bool:
    """One disturbed job; whether it ended as it should. What a failed one left is kept in `folder`."""
    faults, mode, kinds = arguments.faults, arguments.mode, arguments.kinds
    again = f'make soak SEED={seed} FAULTS={faults} TRANSPORT={transport} MODE={mode} KINDS="{" ".join(kinds)}"'
    say(f"seed {seed}, {faults} faults, {transport}; again: {again}")
    begin = time.monotonic()
    try:
        options = {"transport": transport, "mode": mode, "kinds": kinds}
        broken, costs = asyncio.run(disturbed(folder, epochs, seed, faults, say, **options))
        verify(left_alone, broken, costs, epochs)
    except (SoakError, TriremeError) as error:
        say(f"seed {seed}, {transport} FAILED: {error}\nagain: {again}")
        return False
    say(table(costs))
    what = "every bit is the undisturbed run's"
    if mode is Mode.ASYNC:
        what = f"each minibatch was applied once or is on record: {broken.summary['losses']}"
    records = f"each of {broken.windows.total()} records counted once in each of {epochs} epochs"
    say(f"seed {seed}, {transport}: {len(costs)} faults in {time.monotonic() - begin:.0f} s; {what}, {records}")
    return True


def table(costs: Sequence[Cost]) -> str:
    """A line for each kind of fault."""
    lines = [f"{'kind':<18}{'faults':>7}{'rolled back':>13}{'next step after its end, median':>33}{'longest':>10}"]
    for kind in Kind:
        those = [cost for cost in costs if cost.fault.kind is kind]
        seconds = [cost.after_s for cost in those if cost.after_s is not None]
        back = sum(cost.receipt.rolled_back for cost in those)
        times = f"{statistics.median(seconds):>31.2f} s{max(seconds):>8.2f} s" if seconds else ""
        lines += [f"{kind:<18}{len(those):>7}{back:>13}{times}"] if those else []
    return "\n".join(lines)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

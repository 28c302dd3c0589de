"""`python -m tests.soak --seed 7 --faults 30` (`make soak`): break a job of real processes that often, compare every bit."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from shared.runtime import telemetry
from tests.soak.soak import SoakError, disturbed, epochs_for, undisturbed, verify


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--transport", default="auto", help="of trainers to parameter servers: TRIREME_TRANSPORT")
    parser.add_argument("--folder", type=Path, help="keep what the runs leave here; must not exist")
    arguments = parser.parse_args()
    telemetry.configure(level="ERROR", json=False)
    if arguments.folder:
        return soak(arguments.folder.absolute(), arguments)
    with tempfile.TemporaryDirectory(prefix="trireme-soak-") as folder:
        return soak(Path(folder), arguments)


def soak(folder: Path, arguments: argparse.Namespace) -> int:
    seed, faults, transport = arguments.seed, arguments.faults, arguments.transport
    epochs, again = epochs_for(faults), f"make soak SEED={seed} FAULTS={faults} TRANSPORT={transport}"
    say(f"seed {seed}, {faults} faults, {epochs} epochs, {transport}; again: {again}")
    begin = time.monotonic()
    try:
        left_alone = asyncio.run(undisturbed(folder / "undisturbed", epochs))
        say(f"undisturbed: {time.monotonic() - begin:.0f} s")
        broken, receipts = asyncio.run(disturbed(folder / "disturbed", epochs, seed, faults, say, transport))
        verify(left_alone, broken, receipts, epochs)
    except SoakError as error:
        say(f"seed {seed} FAILED: {error}")
        return 1
    say(
        f"seed {seed}: {len(receipts)} faults in {time.monotonic() - begin:.0f} s; every bit is the undisturbed run's, "
        f"each of {left_alone.windows.total()} records counted once in each of {epochs} epochs"
    )
    return 0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

"""Faults at exact moments of a collective job of four trainers: every bit must be the undisturbed run's.

    python -m tests.soak.moments --faults "1:20:pull:during:kill,2:40:push:before:stop"
    python -m tests.soak.moments --seed 1 2 3 --count 12 [--workload charlm] [--transport tcp]

A fault is member:step:operation:phase:kind. Operations: form, push, pull, step, give, join. Phases: before,
during, after. Kinds: kill, stop, cut, delay, size (only push:before), lost (etcd is killed). It happens at
the first such moment in that step or a later one.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.soak.moments.run import TRAINERS, Soak, epochs_for
from tests.soak.moments.schedule import OF_JOBS, drawn_of_jobs, parse
from tests.soak.run import SoakError
from tests.soak.soak import undisturbed
from tests.soak.verify import check_bits, check_records
from tests.soak.workload import WORKLOADS
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import TriremeError


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.moments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--faults", default="", help="with commas between")
    parser.add_argument(
        "--seed", type=int, nargs="*", default=[], help="draw faults instead, one run for each seed"
    )
    parser.add_argument("--count", type=int, default=12, help="faults for each seed")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="digits")
    parser.add_argument("--transport", default="auto", help="TRIREME_TRANSPORT")
    parser.add_argument("--folder", type=Path, help="keep what the runs leave here; must not exist")
    given = parser.parse_args()
    try:
        schedules = {f"seed {seed}": drawn_of_jobs(seed, TRAINERS, given.count) for seed in given.seed}
        schedules = schedules or {"faults": parse(given.faults, OF_JOBS)}
    except ValueError as error:
        parser.error(str(error))
    telemetry.configure(level="ERROR", json=False)
    workload, folder = (
        WORKLOADS[given.workload],
        given.folder or Path(tempfile.mkdtemp(prefix="trireme-moments-")),
    )
    epochs = max(epochs_for(faults, workload) for faults in schedules.values())
    left_alone = asyncio.run(undisturbed(folder / "undisturbed", epochs, workload=workload))
    failed = 0
    for name, faults in schedules.items():
        say(f"{name}: {','.join(map(str, faults))}")
        began = time.monotonic()
        try:
            soak = Soak(folder / name.replace(" ", "-"), faults, workload, given.transport, say)
            broken = asyncio.run(soak.run(epochs))
            check_records(broken, epochs)
            check_bits(left_alone, broken)
        except (SoakError, TriremeError) as error:
            say(f"{name} FAILED: {error}")
            failed += 1
        else:
            taken = time.monotonic() - began
            say(
                f"{name}: {len(faults)} faults in {taken:.0f} s; every bit is the undisturbed "
                "run's, each record counted once an epoch"
            )
    if failed or given.folder:
        say(f"what the runs left is in {folder}")
    else:
        shutil.rmtree(folder)
    return bool(failed)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

"""Embedding tables: the speed table of their design, in one run, beside other systems at their best.

    python -m benchmarks.table [--rows-of-table lookup,step,small,memory,save,deepfm]
                               [--peers Paddle,TFRA,torch] [--bind] [--json]
    python -m benchmarks.table --quick     all rows at sizes of a few minutes, to see that everything works

    lookup, step, small     one table (--rows, --dim) whose rows all exist, and minibatches of --ids ids, Zipf
                            1.1: lookups, lookups with an Adam step, and lookups of 2,000 keys, by one
                            parameter server over --transports. ids/s count all ids, as users do, not only
                            those that differ
    memory, save            a table of --many rows with Adam: what the parameter server's process takes a row,
                            how fast a checkpoint is written, and what steps lose meanwhile
    deepfm                  examples/deepfm/clicks.py, 26 fields of ids and 13 numbers, tables of
                            --clicks-rows rows, batch 4096, 2 trainers: samples/s

Peers: Paddle's parameter server and TFRA (in process) run in virtual environments of their own, which `python
-m benchmarks.other_systems paddle tfra` makes; without them the table says so. torch:
nn.Embedding(sparse=True) and SparseAdam in one process. Peers work in the form that is fastest here; the
notes name it. Ways take turns, round by round: medians, with the quartiles. Rows of all ways are compared:
ours with torch's to the bit, TFRA's and Paddle's with what Adam's steps make of them. Ratios say how many
times better ours is. --bind gives servers one core and all others another one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time

from benchmarks.tables.lines import Line, markdown
from trireme_shared.platform.runtime import process_setup, telemetry

ROWS = ("lookup", "step", "small", "memory", "save", "deepfm")
QUICK = {
    "rows": 100_000,
    "ids": 20_000,
    "rounds": 3,
    "many": 300_000,
    "clicks_rows": 200_000,
    "samples": 131_072,
    "seconds": 2.0,
}


def main() -> int:
    given = _parsed()
    # as `trireme run` starts its members; for everybody
    os.environ.update(process_setup.memory_tunables(os.environ))
    # stdout is the table's, and who is stopped misses beats
    telemetry.configure(level="ERROR", service="benchmark")
    begin, lines = time.monotonic(), []
    for part in (_of_lookups, _of_saving, _of_deepfm):
        found = part(given)
        lines += found
        if found and not given.json:
            print(markdown(found), flush=True)
            print()
    if given.json:
        machine = {
            "cpus": os.cpu_count(),
            "machine": platform.platform(),
            "python": platform.python_version(),
        }
        print(json.dumps({"machine": machine, "lines": [line.as_json() for line in lines]}, indent=1))
    print(f"{time.monotonic() - begin:.0f} s", file=sys.stderr)
    return 0


def _of_lookups(given: argparse.Namespace) -> list[Line]:
    wanted = [row for row in ROWS[:3] if row in given.rows_of_table]
    if not wanted:
        return []
    from benchmarks.tables.lookups import Sizes, measure

    sizes = Sizes(
        given.rows, given.dim, given.ids, given.rounds, given.steps, given.transports, given.peers, given.bind
    )
    return measure(sizes, wanted)


def _of_saving(given: argparse.Namespace) -> list[Line]:
    wanted = [row for row in ("memory", "save") if row in given.rows_of_table]
    if not wanted:
        return []
    from benchmarks.tables.saving import measure

    return measure(given.many, given.dim, given.ids, given.rounds, wanted)


def _of_deepfm(given: argparse.Namespace) -> list[Line]:
    if "deepfm" not in given.rows_of_table:
        return []
    from benchmarks.tables.deepfm import measure

    return measure(given.clicks_rows, given.samples, given.rounds, given.seconds, given.peers)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def some(names: tuple[str, ...]):
        def parse(text: str) -> tuple[str, ...]:
            chosen = tuple(name for name in text.split(",") if name)
            if wrong := [name for name in chosen if name not in names]:
                raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(names)}")
            return chosen

        return parse

    kinds = ("shm", "unix", "tcp")
    parser.add_argument("--rows-of-table", type=some(ROWS), default=ROWS, metavar=",".join(ROWS))
    parser.add_argument(
        "--peers", type=some(("Paddle", "TFRA", "torch")), default=("Paddle", "TFRA", "torch")
    )
    parser.add_argument(
        "--transports", type=some(kinds), default=("shm", "unix", "tcp"), metavar=",".join(kinds)
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--ids", type=int, default=100_000)
    parser.add_argument(
        "--steps", type=int, default=5, help="timed together in a round, until the last is applied"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--many", type=int, default=10_000_000, help="rows of the table that is saved")
    parser.add_argument("--clicks-rows", type=int, default=20_000_000)
    parser.add_argument("--samples", type=int, default=1 << 20, help="made for DeepFM")
    parser.add_argument("--seconds", type=float, default=5.0, help="of DeepFM, per way and round")
    parser.add_argument("--bind", action="store_true")
    parser.add_argument("--quick", action="store_true", help="small sizes, whatever else is said of them")
    parser.add_argument("--markdown", action="store_true", help="the default")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.quick:
        vars(given).update(QUICK)
    if not given.transports:
        parser.error("--transports is empty: name at least one")
    for name in ("rows", "dim", "ids", "steps", "rounds", "many", "clicks_rows", "samples"):
        if getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(given, name)}: it must be at least 1")
    return given


if __name__ == "__main__":
    raise SystemExit(main())

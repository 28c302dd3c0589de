"""Generated scripts on all surfaces: `python -m tests.script_fuzz --scripts 500 --seed S`; or one mutation:
`--only NAME`."""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.script_fuzz.catalogue import CATALOGUE
from tests.script_fuzz.draw import drawn
from tests.script_fuzz.judge import NoScript, judge
from tests.script_fuzz.script import Script
from tests.script_fuzz.surfaces import quiet


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.script_fuzz", description=__doc__)
    parser.add_argument("--scripts", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="the scripts of this mutation alone (a part of its name)")
    parser.add_argument("--each", action="store_true", help="a script for each mutation")
    parser.add_argument("--first", type=int, default=0, help="begin with this script")
    parser.add_argument("--until", type=int, help="end before this one")
    options = parser.parse_args()
    if options.only is not None or options.each:
        scripts = [(each,) for each in CATALOGUE if (options.only or "") in each.name]
    else:
        scripts = drawn(options.seed, options.scripts)
    failed, left_out, chosen = 0, 0, scripts[options.first : options.until]
    tally = Counter[str]()
    for number, mutations in enumerate(chosen, options.first):
        began = time.perf_counter()
        wrong = {}
        try:
            with tempfile.TemporaryDirectory() as folder, quiet():
                wrong = judge(Script(Path(folder), mutations), tally=tally)
        except NoScript as error:
            left_out += 1
            print(f"{number} is left out, plain PyTorch cannot train it: {error.__cause__}".splitlines()[0])
        failed += bool(wrong)
        if time.perf_counter() - began > 10:
            print(f"{number} took {time.perf_counter() - began:.1f} s")
        if wrong:
            print(f"{number}: {' + '.join(each.name for each in mutations)}", flush=True)
            for surface, problem in wrong.items():
                print(f"    {surface}: {shortened(problem)}")
    print(f"{len(chosen)} scripts, {failed} wrong, {left_out} left out; on their surfaces: {dict(tally)}")
    return bool(failed)


def shortened(problem: str) -> str:
    lines = problem.strip().splitlines()
    return " | ".join([lines[0], *lines[-3:]] if len(lines) > 4 else lines)


if __name__ == "__main__":
    sys.exit(main())

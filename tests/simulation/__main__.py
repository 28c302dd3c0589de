"""Replay one seed and print everything: `python -m tests.simulation --mode sync --seed 7`; or try many:
`--seeds 100`."""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import contextlib
import sys
import time

from tests.simulation.ablations import ABLATIONS
from tests.simulation.collective import collective_plan
from tests.simulation.collective_failures import failing_plan
from tests.simulation.collective_settings import varied_plan
from tests.simulation.collective_troubles import troubled_plan
from tests.simulation.drawn import drawn_plan
from tests.simulation.plans import plan_of
from tests.simulation.restores import restored, stored_at_once
from tests.simulation.run import simulate
from trireme_shared.protocol.records import Dispatch, Mode

ENOUGH = 8


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--mode", choices=[mode.value for mode in Mode], default="sync")
    parser.add_argument("--dispatch", choices=[dispatch.value for dispatch in Dispatch], default="master")
    parser.add_argument("--collective", action="store_true", help="without parameter servers; synchronous")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds from --seed on")
    parser.add_argument("--drawn", action="store_true", help="settings and moments of faults are drawn, too")
    parser.add_argument(
        "--moments", action="store_true", help="of collective jobs, with --drawn: faults at moments, too"
    )
    parser.add_argument(
        "--failures",
        action="store_true",
        help="of collective jobs, with --drawn: --moments, storage that fails at single trainers, and pauses",
    )
    parser.add_argument(
        "--restores", action="store_true", help="drawn jobs that are restored several times, back and forth"
    )
    parser.add_argument("--ablate", choices=list(ABLATIONS), help="switch a safeguard off")
    options = parser.parse_args()
    mode, dispatch, failed = Mode(options.mode), Dispatch(options.dispatch), 0
    drawn = plan_of
    if options.collective:
        collective = troubled_plan if options.moments else varied_plan if options.drawn else collective_plan
        collective = failing_plan if options.failures else collective
        drawn = lambda seed, _, dispatch: collective(seed, dispatch)  # noqa: E731
    elif options.drawn:
        drawn = drawn_plan
    if options.restores:
        whole = (lambda seed, *_: varied_plan(seed)) if options.collective else drawn_plan
        drawn = lambda seed, mode, dispatch: restored(whole(seed, mode, dispatch))  # noqa: E731
    if options.seeds == 1:
        print(drawn(options.seed, mode, dispatch))
    for seed in range(options.seed, options.seed + options.seeds):
        began = time.perf_counter()
        ablated = ABLATIONS[options.ablate]() if options.ablate else contextlib.nullcontext()
        with ablated, stored_at_once() if options.restores else contextlib.nullcontext():
            plan = drawn(seed, mode, dispatch)
            outcome = simulate(seed, mode, print if options.seeds == 1 else None, plan, dispatch)
        failed += bool(outcome.violations)
        if failed > ENOUGH:
            break
        spent = time.perf_counter() - began
        if outcome.violations or options.seeds == 1:
            print(
                f"seed {seed}: {outcome.seconds:.1f} s virtual, {spent:.2f} s, {outcome.callbacks} "
                f"callbacks {outcome.counts}"
            )
            print(f"  {outcome}" if outcome.violations else "  no violation")
    print(f"{options.seeds} seeds, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

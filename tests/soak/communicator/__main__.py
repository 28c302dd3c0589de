"""See run.py."""

from __future__ import annotations

import argparse
import asyncio
from functools import partial

from tests.soak.communicator.run import Soak
from tests.soak.moments.schedule import drawn, parse

say = partial(print, flush=True)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.communicator", description="Communicators under faults."
    )
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--steps", type=int, default=0, help="0: some more than the last fault's")
    parser.add_argument("--faults", default="", help="member:step:operation:phase:kind, with commas between")
    parser.add_argument(
        "--seed", type=int, nargs="*", default=[], help="draw faults instead, one run for each seed"
    )
    parser.add_argument("--count", type=int, default=10, help="faults for each seed")
    parser.add_argument("--reduction", default="native", choices=["native", "canonical"])
    given = parser.parse_args()
    runs = [(f"seed {seed}", drawn(seed, given.members, given.count)) for seed in given.seed]
    for name, faults in runs or [("faults", parse(given.faults))]:
        steps = given.steps or max((fault.step for fault in faults), default=0) + 20
        say(f"{name}: {','.join(map(str, faults))}")
        say(
            asyncio.run(
                Soak(
                    given.members, steps, faults, {"REDUCTION": given.reduction}, whole=bool(given.seed)
                ).run()
            )
        )

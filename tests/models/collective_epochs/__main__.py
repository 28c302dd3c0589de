"""Executable model of collective jobs: trainers average gradients among themselves, generation by generation,
and no step is lost, doubled or torn.

    master: who holds the parameters
        ─► generation g, its members, lanes, owners of blocks (numbers never repeat)
    member: reads g ─► fenced ─► states its version ─► all have stated
        ─► who lacks the newest version gets its kept means ─► pushes, pulls, steps

Members are killed, frozen, thawed and joined at random between any two messages; messages are late, in any
order, doubled and lost; masters change; all may die, and go back to a checkpoint. A record may be discarded:
then who computes its lane anew takes the next one, so a step of two generations would show. When the faults
stop, the run must end within a bound.

Always: members that are in one generation and have the same version have the same bits, those of the
undisturbed run over the same records; a listed member never loses its version. At the end each record was
counted once, or discarded.

    python -m tests.models.collective_epochs [SCHEDULES] [ABLATION]

Each ablation switches one rule off, and must be caught. (Means are sums of lanes here, and a lane pushes for
itself: any fixed tree serves the protocol.)
"""

from __future__ import annotations

import sys
from collections import Counter

from tests.models.collective_epochs.ablations import ABLATIONS
from tests.models.collective_epochs.job import run

SCHEDULES = 1500


def main(arguments: list[str]) -> int:
    schedules = int(arguments[0]) if arguments else SCHEDULES
    ablation = arguments[1] if len(arguments) > 1 else ""
    if ablation and ablation not in ABLATIONS:
        sys.stderr.write(f"no ablation {ablation!r}; there are {', '.join(ABLATIONS)}\n")
        return 2
    wrong: dict[int, str] = {}
    seen: Counter[str] = Counter()
    for seed in range(schedules):
        broken, happened = run(seed, ablation)
        seen += happened
        if broken:
            wrong[seed] = broken[0]
        if wrong and ablation:
            break
    sys.stdout.write(
        f"{seed + 1} schedules, wrong: {len(wrong)} {dict(list(wrong.items())[:5])}; {dict(seen)}\n"
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

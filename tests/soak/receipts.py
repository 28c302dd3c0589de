"""What faults cost, as tables; `python -m tests.soak.receipts FILE...` over all runs that wrote them there
(`python -m tests.soak --receipts FILE`)."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.soak.inflict import Cost
from tests.soak.plan import LEASE_S, Fault, Kind
from trireme.cli.chaos import Receipt


def table(costs: Sequence[Cost]) -> str:
    """A line for each kind of fault."""
    lines = [
        f"{'kind':<18}{'faults':>7}{'rolled back':>13}{'next step after its end, median':>33}{'longest':>10}"
    ]
    for kind in Kind:
        those = [cost for cost in costs if cost.fault.kind is kind]
        seconds = [cost.after_s for cost in those if cost.after_s is not None]
        back = sum(cost.receipt.rolled_back for cost in those)
        times = f"{statistics.median(seconds):>31.2f} s{max(seconds):>8.2f} s" if seconds else ""
        lines += [f"{kind:<18}{len(those):>7}{back:>13}{times}"] if those else []
    return "\n".join(lines)


def collective_table(costs: Sequence[Cost]) -> str:
    """Of members that are missed: how long the others do without, and until all are back."""
    killed = [cost for cost in costs if cost.fault.kind is Kind.KILL_TRAINER]
    frozen = [cost for cost in costs if cost.without_s is not None]
    everybody = [cost for cost in costs if cost.fault.kind in (Kind.KILL_TRAINERS, Kind.KILL_EVERYTHING)]
    rows = {
        "SIGKILL of one: next step of all others (goal 1 s)": [cost.receipt.next_step_s for cost in killed],
        "SIGKILL of one: noticed": [cost.receipt.noticed_s for cost in killed],
        "SIGKILL of one: it is back as a member": [cost.whole_s for cost in killed],
        f"SIGSTOP of one: next step of all others (goal {LEASE_S + 0.5:g} s)": [
            cost.without_s for cost in frozen
        ],
        "SIGCONT: it is back as a member": [cost.whole_s for cost in frozen],
        "SIGKILL of all trainers: next step, rolled back": [cost.receipt.next_step_s for cost in everybody],
    }
    lines = [f"{'':<56}{'times':>6}{'median':>9}{'90 %':>9}{'99 %':>9}{'longest':>9}"]
    for what, found in rows.items():
        if seconds := sorted(each for each in found if each is not None):
            shares = [percentile(seconds, share) for share in (50, 90, 99, 100)]
            lines.append(f"{what:<56}{len(seconds):>6}" + "".join(f"{share:>7.2f} s" for share in shares))
    return "\n".join(lines)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The lowest of `ordered` that `share` percent of them do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)]


def write(costs: Sequence[Cost], file: Path) -> None:
    """A line for each fault, behind those that are there."""
    with file.open("a") as lines:
        lines.writelines(json.dumps(asdict(cost)) + "\n" for cost in costs)


def read(file: Path) -> list[Cost]:
    found = []
    for line in file.read_text().splitlines():
        values = json.loads(line)
        fault, receipt = values.pop("fault"), values.pop("receipt")
        fault |= {"kind": Kind(fault["kind"]), "victims": tuple(fault["victims"])}
        found.append(Cost(Fault(**fault), Receipt(**receipt), **values))
    return found


if __name__ == "__main__":
    everything = [cost for name in sys.argv[1:] for cost in read(Path(name))]
    sys.stdout.write(f"{len(everything)} faults\n{table(everything)}\n{collective_table(everything)}\n")

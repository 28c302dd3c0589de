"""One process of the soak: a loop as a user writes it, which does its faults to itself and notes every
result.

python -m tests.soak.communicator.member NUMBER STEPS FAULTS RECORD
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

import trireme
from tests.soak.moments.cutting import cut_all
from tests.soak.moments.schedule import Fault, parse

PACE_S = 0.01
SIZES = (7, 3000, 200_000)

say = partial(print, flush=True)


class Member:
    def __init__(self, number: int, steps: int, faults: list[Fault], record: Path) -> None:
        self.number, self.steps, self.members = number, steps, int(os.environ["MEMBERS"])
        self.faults = [fault for fault in faults if fault.member == number]
        self.record = record.open("a", buffering=1)
        self.state = {"values": [np.zeros(size) for size in SIZES], "step": 0}
        self.communicator = trireme.CollectiveCommunicator(
            timeout_s=60,
            lease_ttl_s=2,
            observer=self.observe,
            reduction=os.environ.get("REDUCTION", "native"),
        )

    def note(self, **what) -> None:
        self.record.write(json.dumps({"at": time.monotonic(), "member": self.number} | what) + "\n")

    def observe(self, phase: str, operation: str, number: int) -> None:
        step = self.state["step"] + 1
        if os.environ["WHOLE"] and self.communicator.size < self.members:
            return
        for fault in self.faults:
            due = fault.step <= step and fault.kind != "size"  # who joins late does them late
            if due and (fault.operation, fault.phase) == (operation, phase):
                self.faults.remove(fault)
                self.note(fault=str(fault))
                self.inflict(fault.kind)
                return

    def inflict(self, kind: str) -> None:
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            say("stopped")
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "cut":
            cut_all()
        elif kind == "delay":
            time.sleep(0.5)
        elif kind == "lost":
            say("lost")

    def gradients(self, step: int) -> list[np.ndarray]:
        return [np.random.default_rng((step, self.number, size)).standard_normal(size) for size in SIZES]

    def run(self) -> None:
        communicator = self.communicator
        say("ready")
        while not Path(self.record.name).with_name("go").exists():
            time.sleep(0.01)
        complete, over = Path(self.record.name).with_name("complete"), False
        while not over:
            if communicator.joined:
                status, state = communicator.broadcast(self.state)
                self.note_status(status, state)
                if status == trireme.SUCCEEDED:
                    self.state = state
                continue
            step = self.state["step"] + 1
            wrong = next((each for each in self.faults if each.kind == "size" and each.step <= step), None)
            if wrong is not None:
                self.faults.remove(wrong)
                self.note(fault=str(wrong))
            gradients = self.gradients(step)
            all_here = np.full(1, float(complete.exists()))  # everybody learns it in the same step
            given = [*gradients, all_here, np.zeros(1)] if wrong is not None else [*gradients, all_here]
            time.sleep(PACE_S)
            status, mean = communicator.allreduce(given, op="MEAN", weight=1 + step % 3)
            self.note_status(status, mean)
            if status == trireme.SUCCEEDED:
                for values, gradient in zip(self.state["values"], mean, strict=False):
                    values -= 0.1 * gradient
                self.state["step"] = step
                over = step >= self.steps and mean[-1][0] > 0 and communicator.size == self.members
        while not communicator.barrier():
            if communicator.joined:
                communicator.broadcast(self.state)
        self.note(end=digest(self.state))
        communicator.close()

    def note_status(self, status: trireme.Status, value) -> None:
        if status == trireme.SUCCEEDED:
            self.note(
                number=status.number, epoch=status.epoch, digest=digest(value), size=self.communicator.size
            )
        else:
            self.note(failed=str(status.cause), reason=status.reason)


def digest(value) -> str:
    found = hashlib.blake2b(digest_size=8)
    for array in value["values"] if isinstance(value, dict) else value:
        found.update(array.tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    Member(int(sys.argv[1]), int(sys.argv[2]), parse(sys.argv[3]), Path(sys.argv[4])).run()

"""Faults at exact moments, as in Rabit's tests: `1:40:allreduce:during:kill,2:60:allreduce:before:stop`.

member (0, 1, ...) : step : operation : phase : kind
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

OPERATIONS = ("allreduce", "broadcast", "barrier")  # of a communicator
OF_JOBS = ("form", "push", "pull", "step", "give", "join")
PHASES = ("before", "during", "after")
KINDS = ("kill", "stop", "cut", "delay", "size", "lost")
WEIGHTS = (8, 1, 4, 2, 3, 1)


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind`: kill SIGKILL; stop SIGSTOP until after the lease; cut all connections to other members; delay
    half a second; size: the member gives a tensor of another size; lost: etcd is killed, and started again.

    `operation` of a job: form: the trainers of a generation say what they have; push, pull: of gradients;
    step: the own optimizer; give: a trainer gives its parameters to another one; join: it gets them."""

    member: int
    step: int
    operation: str
    phase: str
    kind: str

    def __str__(self) -> str:
        return f"{self.member}:{self.step}:{self.operation}:{self.phase}:{self.kind}"

    @classmethod
    def of(cls, text: str, operations: Sequence[str] = OPERATIONS) -> Fault:
        parts = text.split(":")
        if len(parts) != 5:
            raise ValueError(
                f"{text!r} is not member:step:operation:phase:kind, as 1:40:{operations[0]}:during:kill"
            )
        member, step, operation, phase, kind = parts
        for value, known in ((operation, operations), (phase, PHASES), (kind, KINDS)):
            if value not in known:
                raise ValueError(f"{value!r} in {text!r} is none of {', '.join(known)}")
        if kind == "size" and operations is OF_JOBS and (operation, phase) != ("push", "before"):
            raise ValueError(f"{text!r}: only push:before can have a wrong size")
        return cls(int(member), int(step), operation, phase, kind)


def parse(text: str, operations: Sequence[str] = OPERATIONS) -> list[Fault]:
    return [Fault.of(part.strip(), operations) for part in text.split(",") if part.strip()]


def drawn(seed: int, members: int, faults: int, apart: int = 12) -> list[Fault]:
    """Of communicators. Whoever is killed is replaced by a new member, which has the next number."""
    chance = random.Random(seed)
    alive, next_number, found = list(range(members)), members, []
    for place in range(faults):
        kind = chance.choices(KINDS, weights=WEIGHTS)[0]
        member = chance.choice(alive)
        phase = "before" if kind == "size" else chance.choice(PHASES)
        found.append(
            Fault(member, 10 + place * apart + chance.randrange(apart // 2), "allreduce", phase, kind)
        )
        if kind == "kill":
            alive.remove(member)
            alive.append(next_number)
            next_number += 1
    return found


def drawn_of_jobs(seed: int, members: int, faults: int, apart: int = 8) -> list[Fault]:
    """Of trainers. Whoever is killed is replaced by one of the same number. Kills come first, so that there
    is somebody who joins."""
    chance = random.Random(seed)
    found = []
    for place in range(faults):
        kind = chance.choices(KINDS, weights=WEIGHTS)[0] if place else "kill"
        operation = "push" if kind == "size" or not place else chance.choice(OF_JOBS)
        phase = "before" if kind == "size" else chance.choice(PHASES)
        step = 5 + place * apart + chance.randrange(apart // 2)
        found.append(Fault(chance.randrange(members), step, operation, phase, kind))
    return found

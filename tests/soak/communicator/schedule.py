"""Faults at exact places, as in Rabit's tests: `1:40:allreduce:during:kill,2:60:allreduce:before:stop`.

member (0, 1, ... as they were started) : step : operation : phase : kind
"""

from __future__ import annotations

import random
from dataclasses import dataclass

OPERATIONS = ("allreduce", "broadcast", "barrier")
PHASES = ("before", "during", "after")
KINDS = ("kill", "stop", "cut", "delay", "size", "lost")


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind`: kill SIGKILL; stop SIGSTOP until after the lease; cut all connections of the group; delay half a second; size: the
    member calls with a tensor of another size; lost: etcd is killed, and started again."""

    member: int
    step: int
    operation: str
    phase: str
    kind: str

    def __str__(self) -> str:
        return f"{self.member}:{self.step}:{self.operation}:{self.phase}:{self.kind}"

    @classmethod
    def of(cls, text: str) -> Fault:
        parts = text.split(":")
        if len(parts) != 5:
            raise ValueError(f"{text!r} is not member:step:operation:phase:kind, as 1:40:allreduce:during:kill")
        member, step, operation, phase, kind = parts
        for value, known in ((operation, OPERATIONS), (phase, PHASES), (kind, KINDS)):
            if value not in known:
                raise ValueError(f"{value!r} in {text!r} is none of {', '.join(known)}")
        return cls(int(member), int(step), operation, phase, kind)


def parse(text: str) -> list[Fault]:
    return [Fault.of(part.strip()) for part in text.split(",") if part.strip()]


def drawn(seed: int, members: int, faults: int, apart: int = 12) -> list[Fault]:
    """Whoever is killed is replaced by a new member, which has the next number."""
    chance = random.Random(seed)
    alive, next_number, found = list(range(members)), members, []
    for place in range(faults):
        kind = chance.choices(KINDS, weights=(8, 1, 4, 2, 3, 1))[0]
        member = chance.choice(alive)
        phase = "before" if kind == "size" else chance.choice(PHASES)
        found.append(Fault(member, 10 + place * apart + chance.randrange(apart // 2), "allreduce", phase, kind))
        if kind == "kill":
            alive.remove(member)
            alive.append(next_number)
            next_number += 1
    return found

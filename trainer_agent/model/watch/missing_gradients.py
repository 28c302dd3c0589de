"""Trained parameters that get no gradient in a minibatch: plain PyTorch leaves them alone, a job steps them with a gradient of 0, since another
lane may have one. Where that moves them, the user hears of it."""

from __future__ import annotations

from collections.abc import Sequence

from trainer_agent.model.flat import Plan

NAMED = 3  # parameters in a warning
MOST = 5  # warnings of a process
WARNING = (
    "{names} got no gradient from a minibatch, so a step takes 0 as its gradient there, and {cause} moves {it} all the same (plain PyTorch "
    "leaves a parameter without a gradient alone, if no other minibatch of the step has one). If nothing uses {it}, leave {it} out of the "
    "optimizer, or call requires_grad_(False) in model()"
)


class MissingGradients:
    """`minibatch` after each backward. `warnings` are taken by `told`: each parameter is in one of them at most."""

    def __init__(self, plan: Plan) -> None:
        spec = plan.layout.optimizer
        self._names = [place.name for place in plan.parameters]
        options = [spec.defaults | spec.groups[plan.layout.segments[place.segment].group] for place in plan.parameters]
        self._decays = [bool(each.get("weight_decay")) for each in options]
        self._remembers = [spec.name != "SGD" or bool(each.get("momentum")) for each in options]
        self._had = [False] * len(self._names)
        self._told: set[str] = set()
        self._warnings: list[str] = []
        self._count = 0

    def minibatch(self, made: Sequence[int]) -> None:
        """`made[i]`: how many gradients parameter i of the plan got."""
        if all(made):
            self._had = [True] * len(made)
            return
        for moving, cause in (
            (self._decays, "weight decay"),
            (
                [kept and had for kept, had in zip(self._remembers, self._had, strict=True)],
                "what the optimizer has kept",
            ),
        ):
            found = zip(self._names, moving, made, strict=True)
            self._tell([name for name, moves, count in found if moves and not count and name not in self._told], cause)
        self._had = [had or bool(count) for had, count in zip(self._had, made, strict=True)]

    def told(self) -> tuple[str, ...]:
        """The warnings since the last call."""
        told, self._warnings = tuple(self._warnings), []
        return told

    def _tell(self, names: list[str], cause: str) -> None:
        self._told |= set(names)
        if not names or self._count == MOST:
            return
        self._count += 1
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        listed = f"the parameter{'s' if len(names) > 1 else ''} {', '.join(names[:NAMED])}{more}"
        self._warnings.append(WARNING.format(names=listed, cause=cause, it="them" if len(names) > 1 else "it"))

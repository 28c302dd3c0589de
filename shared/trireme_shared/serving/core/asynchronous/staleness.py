"""Asynchronous: how old the parameters were that a push's gradient was computed from, and what follows from it.

trainer pulls version v ─► computes ─► its push finds version w: w - v versions are ahead ─► it steps with lr / max(1, w - v)

A version is one push that was applied. The trainer's own pushes since its pull count as well: they changed the parameters, too.
"""

from __future__ import annotations

from trireme_shared.serving.core.optimizers import Options


def divisor(ahead: int) -> int:
    """Of the learning rate. `ahead`: versions since the parameters were pulled; less than 0 if a parameter server came back from a checkpoint."""
    return max(1, ahead)


def slowed(options: Options, arguments: Options | None, ahead: int) -> Options:
    """The options of a step, with the learning rate divided. `arguments`: the optimizer was made with them; they have the rate if `options` do not."""
    by = divisor(ahead)
    rate = options.get("lr", (arguments or {}).get("lr"))
    return options if rate is None else {**options, "lr": rate / by}

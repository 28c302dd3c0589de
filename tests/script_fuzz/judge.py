"""The oracle: a script is trained as plain PyTorch trains it, bit for bit, or it is refused with a name in
the message."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import torch

from tests.script_fuzz.script import Script
from tests.script_fuzz.surfaces import Metrics, Outcome, State, reference, surfaces_of

ROUNDINGS = 1e-5


class NoScript(Exception):
    """Plain PyTorch itself cannot train a script of these mutations together, so it says nothing about
    Trireme."""


def judge(script: Script, part: int | None = None, tally: Counter[str] | None = None) -> dict[str, str]:
    """By surface: what is wrong there. Empty: nothing is. `part`: see surfaces_of. `tally`, in place: on how
    many surfaces it was equal, told, refused or wrong. Raises NoScript."""
    surfaces, wrong = surfaces_of(script, part), dict[str, str]()
    try:
        expected = {
            kind: reference(script, asynchronous=kind)
            for kind in {"asynchronous" in name for name in surfaces}
        }
    except Exception as error:
        if len(script.mutations) > 1:
            raise NoScript from error
        if not script.names(""):
            return {"plain PyTorch": f"{type(error).__name__}: {error}"}
        # then it is refused everywhere
        failed = {f"{type(error).__name__} in plain PyTorch": torch.zeros(1)}, dict[str, float]()
        expected = {False: failed, True: failed}
    found = {name: surface(script) for name, surface in surfaces.items()}
    for name, outcome in found.items():
        kind = "asynchronous" in name
        if problem := problem_of(script, outcome, *expected[kind], script.names(name)):
            wrong[name] = problem
        if tally is not None:
            tally[_fate(outcome, problem, *expected[kind])] += 1
    trained = [
        name for name, outcome in found.items() if name.startswith("python") and outcome.state is not None
    ]
    if trained and _no_job_trains(script, found):  # then it is refused under plain Python, too
        wrong |= dict.fromkeys(trained, "trained, and every job refuses it")
    return wrong


def _fate(outcome: Outcome, problem: str, state: State, metrics: Metrics) -> str:
    if problem:
        return "silent" if outcome.state is not None else "wrong"
    if outcome.state is None:
        return "refused"
    is_equal = not differences(outcome.state, state, ROUNDINGS) and not _other_metrics(
        outcome.metrics, metrics
    )
    return "equal" if is_equal else "told"


def _no_job_trains(script: Script, found: Mapping[str, Outcome]) -> bool:
    """`found`: on a part of the surfaces. The others are asked if those refuse: asynchronous jobs alone
    may."""
    jobs = [outcome for name, outcome in found.items() if not name.startswith("python")]
    if not jobs or any(outcome.state is not None for outcome in jobs):
        return False
    others = [
        surface
        for name, surface in surfaces_of(script).items()
        if name not in found and not name.startswith("python")
    ]
    return all(surface(script).state is None for surface in others)


def problem_of(
    script: Script, outcome: Outcome, expected: State, metrics: Metrics, names: tuple[str, ...]
) -> str:
    """`names`: of which a refusal must have one."""
    if outcome.crashed:
        return f"crashed: {outcome.crashed}"
    if outcome.state is None:
        if not _is_finite(expected) and _is_about(("nan", "inf", "not finite"), outcome.refused):
            return ""
        return (
            "" if _is_about(names, outcome.refused) else f"refused, without one of {names}: {outcome.refused}"
        )
    rounds = any(mutation.rounds for mutation in script.mutations)
    differing = differences(outcome.state, expected, ROUNDINGS if rounds else 0.0)
    if not (differing := differing or _other_metrics(outcome.metrics, metrics)):
        return ""
    if _is_about(names, "\n".join(outcome.told)):
        return ""
    return f"trained in silence, and differs in {', '.join(differing)}"


def _is_about(names: tuple[str, ...], text: str) -> bool:
    return any(name.lower() in text.lower() for name in names)


def _is_finite(state: State) -> bool:
    """Rates that go together badly give a script that learns nothing."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in state.values())


def differences(found: State, expected: State, tolerance: float = 0.0) -> list[str]:
    if list(found) != list(expected):
        return [f"names {sorted(set(found) ^ set(expected)) or 'in another order'}"]
    return [name for name in expected if not _equal(found[name], expected[name], tolerance)]


def _other_metrics(found: Metrics, expected: Metrics) -> list[str]:
    """Sums of floats are rounded once in a job, and at each minibatch by plain metric objects. A job has no
    metrics that are not finite."""
    wanted = {name: value for name, value in expected.items() if math.isfinite(value)}
    return [
        f"the metric {name}: {found.get(name)} instead of {wanted.get(name)}"
        for name in sorted(found | wanted)
        if not math.isclose(found.get(name, math.nan), wanted.get(name, math.nan), rel_tol=ROUNDINGS)
    ]


def _equal(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one, other) or bool(
        torch.isclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True).all()
    )

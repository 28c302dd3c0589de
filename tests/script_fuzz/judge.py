"""The oracle: a script is trained as plain PyTorch trains it, bit for bit, or it is refused with a name in
the message."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tests.script_fuzz.script import Script
from tests.script_fuzz.surfaces import Outcome, State, reference, surfaces_of

ROUNDINGS = 1e-5


class NoScript(Exception):
    """Plain PyTorch itself cannot train a script of these mutations together, so it says nothing about
    Trireme."""


def judge(script: Script, part: int | None = None) -> dict[str, str]:
    """By surface: what is wrong there. Empty: nothing is. `part`: see surfaces_of. Raises NoScript."""
    surfaces, wrong = surfaces_of(script, part), dict[str, str]()
    try:
        expected = {
            kind: reference(script, asynchronous=kind)
            for kind in {"asynchronous" in name for name in surfaces}
        }
    except Exception as error:
        if len(script.mutations) > 1:
            raise NoScript from error
        return {"plain PyTorch": f"{type(error).__name__}: {error}"}
    found = {name: surface(script) for name, surface in surfaces.items()}
    for name, outcome in found.items():
        if problem := problem_of(script, outcome, expected["asynchronous" in name]):
            wrong[name] = problem
    trained = [
        name for name, outcome in found.items() if name.startswith("python") and outcome.state is not None
    ]
    if trained and _no_job_trains(script, found):  # then it is refused under plain Python, too
        wrong |= dict.fromkeys(trained, "trained, and every job refuses it")
    return wrong


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


def problem_of(script: Script, outcome: Outcome, expected: State) -> str:
    if outcome.crashed:
        return f"crashed: {outcome.crashed}"
    if outcome.state is None:
        if not _is_finite(expected) and _is_about(("nan", "inf", "not finite"), outcome.refused):
            return ""
        return (
            ""
            if _named(script, outcome.refused)
            else f"refused, without one of {script.names}: {outcome.refused}"
        )
    rounds = any(mutation.rounds for mutation in script.mutations)
    if not (differing := differences(outcome.state, expected, ROUNDINGS if rounds else 0.0)):
        return ""
    if _named(script, "\n".join(outcome.told)):
        return ""
    return f"trained in silence, and differs in {', '.join(differing)}"


def _named(script: Script, text: str) -> bool:
    return _is_about(script.names, text)


def _is_about(names: tuple[str, ...], text: str) -> bool:
    return any(name.lower() in text.lower() for name in names)


def _is_finite(state: State) -> bool:
    """Rates that go together badly give a script that learns nothing."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in state.values())


def differences(found: State, expected: State, tolerance: float = 0.0) -> list[str]:
    if list(found) != list(expected):
        return [f"names {sorted(set(found) ^ set(expected)) or 'in another order'}"]
    return [name for name in expected if not _equal(found[name], expected[name], tolerance)]


def _equal(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one, other) or bool(
        torch.isclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True).all()
    )

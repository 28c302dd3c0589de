"""What becomes of a buffer that lanes leave with different values, as the script's `buffers` says.

    buffers = {"queue": "first", "ema.*": "mean"}     patterns of names -> policies

    "mean"    the mean over the lanes, weighted by their records. Floating-point buffers have it by default
    "first"   the value of the first lane that has data; what the others made of the buffer is dropped

An int64 buffer has the first lane's value in either case: integers have no mean. Patterns are those of
`fnmatch`: `*` stands for any text, dots too.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Literal, cast, get_args

import torch
from torch import nn

from trireme_shared.protocol.errors import InvalidArgument

Policy = Literal["mean", "first"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
SHOWN = 4
HOW = (
    'write buffers = {"queue": "first"}: names of buffers, or patterns such as "ema.*", and "first" or "mean"'
)
MEANS = '"first" is the value of the first lane, "mean" the mean over the lanes'


def checked(said: object, where: str) -> dict[str, Policy]:
    """What a script says of its buffers; None, or a module of that name, says nothing. `where`: for messages,
    "buffers in script.py". Raises InvalidArgument for what is no dict of policies by pattern."""
    if said is None or isinstance(said, ModuleType):
        return {}
    if not isinstance(said, Mapping) or not all(isinstance(pattern, str) for pattern in said):
        what = "has keys that are no text" if isinstance(said, Mapping) else f"is {type(said).__name__}"
        raise InvalidArgument(f"{where} {what}", hint=f"{HOW}; if it is something else, give it another name")
    for pattern, policy in said.items():
        if policy not in POLICIES:
            near = difflib.get_close_matches(str(policy), POLICIES, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidArgument(
                f"{where} says {policy!r:.80} for {pattern!r}: expected 'first' or 'mean'{meant}", hint=MEANS
            )
    return {pattern: cast("Policy", policy) for pattern, policy in said.items()}


def policies_of(model: nn.Module, said: Mapping[str, Policy], *, has_lanes: bool = True) -> dict[str, Policy]:
    """The policy of each buffer that a pattern names, by the buffer's name. `has_lanes`: the job is
    synchronous. Raises InvalidArgument for a pattern that fits no buffer or changes none, and for two that
    contradict each other."""
    found: dict[str, tuple[str, Policy]] = {}
    buffers = dict(model.named_buffers())
    for pattern, policy in said.items():
        names = [name for name in buffers if fnmatchcase(name, pattern)]
        says = f"buffers says {policy!r} for {pattern!r}"
        if not names:
            raise InvalidArgument(f"{says}, and the model has no such buffer", hint=_nearest(model, pattern))
        if policy == "first" and not has_lanes:
            raise InvalidArgument(
                f"{says}, and the job is asynchronous: its minibatches have no lanes, the newest push "
                "replaces a floating-point buffer, and what is added to integer ones adds up",
                hint="set mode = sync, or leave it out of buffers (docs/script.md)",
            )
        _check_has_effect({name: buffers[name] for name in names}, policy, says)
        for name in names:
            before, other = found.setdefault(name, (pattern, policy))
            if other != policy:
                raise InvalidArgument(
                    f"buffers says {other!r} for {before!r} and {policy!r} for {pattern!r}, and both fit the "
                    f"buffer {name}",
                    hint="let only one of them fit it",
                )
    return {name: policy for name, (_, policy) in found.items()}


def kind_of(buffer: torch.Tensor, policy: Policy | None) -> str:
    """Segment.kind of a buffer: integers follow the first lane as it is."""
    return "first" if policy == "first" and buffer.is_floating_point() else "buffer"


def _check_has_effect(named: Mapping[str, torch.Tensor], policy: Policy, says: str) -> None:
    shared = [b for b in named.values() if b.is_floating_point() or b.dtype == torch.int64]
    name, first = next(iter(named.items()))
    if not shared:
        raise InvalidArgument(
            f"{says}, and the buffer {name} is {first.dtype}: such buffers are constants of the model, which "
            "trainers do not share",
            hint="make it a floating-point or int64 buffer, or leave it out of buffers",
        )
    if policy == "mean" and not any(b.is_floating_point() for b in shared):
        raise InvalidArgument(
            f"{says}, and the buffer {name} is torch.int64: integers have no mean, it has the first lane's "
            "value",
            hint='say "first", or leave it out of buffers',
        )


def _nearest(model: nn.Module, pattern: str) -> str:
    """What to do about a pattern that fits no buffer."""
    buffers = [name for name, _ in model.named_buffers()]
    parameters = [name for name, _ in model.named_parameters() if fnmatchcase(name, pattern)]
    if parameters:
        return (
            f"{parameters[0]} is a parameter, which only the optimizer changes; a buffer is made by "
            "register_buffer"
        )
    if not buffers:
        return "the model has no buffers at all; one is made by register_buffer"
    own = pattern.rpartition(".")[2]
    near = [name for name in buffers if name.rpartition(".")[2] == own]
    near += [each for each in difflib.get_close_matches(pattern, buffers, SHOWN, 0.5) if each not in near]
    what = "the nearest are" if near else "its buffers are"
    shown = near or buffers
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return f"{what} {', '.join(shown[:SHOWN])}{more}"

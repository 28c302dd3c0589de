"""`trireme run` takes names of other systems where they mean the same.

--num_workers 4     means the same  -> --trainers 4, and a line on stderr that names it
--grads_to_wait 2   does not        -> an error that says what to use
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from trireme.cli.other_systems.names import ACCEPTED, FALSE, PAGE, REFUSED, TRUE, Accepted, Unfit


class OtherNameError(Exception):
    """A name of another system that has no counterpart, or with a value that has none."""


def translated(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments with our names, and a line about each name that was another system's. Raises OtherNameError."""
    given = list(arguments)
    notes: list[str] = []
    found: list[str] = []
    while given:
        word = given.pop(0)
        if word == "--":
            return [*found, word, *given], notes
        name, equals, value = word.partition("=")
        if name in REFUSED:
            refused = REFUSED[name]
            msg = f"{name} is an option of {refused.system}: {refused.instead} ({PAGE})"
            raise OtherNameError(msg)
        if name not in ACCEPTED:
            found.append(word)
            continue
        accepted = ACCEPTED[name]
        if not equals:
            value = _next_value(name, accepted, given)
        try:
            ours = accepted.ours(value)
        except Unfit as error:
            msg = f"{name} {value} is an option of {accepted.system}: {error} ({PAGE})"
            raise OtherNameError(msg) from error
        _check_once(name, ours, [*arguments, *found])
        found += ours
        notes.append(f"{name} is an option of {accepted.system}; ours is {' '.join(ours)} ({PAGE})")
    return found, notes


def _next_value(name: str, accepted: Accepted, given: list[str]) -> str:
    """Taken from `given`."""
    if given and (not accepted.alone or given[0].lower() in (*TRUE, *FALSE)):
        return given.pop(0)
    if accepted.alone:
        return accepted.alone
    msg = f"{name} needs a value ({PAGE})"
    raise OtherNameError(msg)


def _check_once(name: str, ours: Sequence[str], arguments: Sequence[str]) -> None:
    """Raises OtherNameError: our name is there as well, as a flag or in --set."""
    setting = ours[1].partition("=")[0] if ours[0] == "--set" else ours[0].removeprefix("--").replace("-", "_")
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        flag, equals, attached = argument.partition("=")
        assigned = (attached if equals else following).partition("=")[0].strip()
        if flag == ours[0] != "--set" or (flag == "--set" and assigned == setting):
            msg = f"{name} is {' '.join(ours)} here, which is given as well: leave out one of both ({PAGE})"
            raise OtherNameError(msg)


class WithOtherNames(TyperCommand):
    """A command that takes them, and does not show them in its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            args, notes = translated(args)
        except OtherNameError as error:
            from trireme.cli.exit_codes import USAGE, report_error  # noqa: PLC0415
            from trireme_shared.protocol.errors import InvalidArgument  # noqa: PLC0415

            report_error(InvalidArgument(str(error)), as_json="--json" in args)
            raise typer.Exit(USAGE) from error
        for note in notes:
            print(note, file=sys.stderr)  # noqa: T201
        return super().parse_args(ctx, args)

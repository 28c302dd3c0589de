"""Errors raised in a task of a running process, at the place where it waits; and the table of ARCHITECTURE.md
that says what each of them may end.

A task is called after the first method of the product that it runs, and the class of its object:
`Retention.run`. What waits for tasks of its own is left alone: these are struck themselves.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.equipment.virtual_loop import Process, waited_for
from trireme_shared.protocol.errors import Conflict

ROOT = Path(__file__).parents[2]
PACKAGES = ("master_service", "pserver_service", "trainer_agent", "trireme", "shared")
CONTAINMENT = "containment.py"
AROUND = {"_guarded"}  # of a launcher: around each of its tasks
OWN_TASKS = {"TaskGroup.__aexit__", "_wait"}  # in which a task waits for others
TITLE = "## Which error may end what"


class LibraryError(Exception):
    """What a library raises: neither an OSError nor one of ours."""


#: By name what is raised; None: what the task waits for is cancelled by somebody else.
ERRORS: dict[str, Callable[[], Exception] | None] = {
    "ours": lambda: Conflict("struck"),
    "system": lambda: OSError("struck"),
    "library": lambda: LibraryError("struck"),
    "overflow": lambda: OverflowError("struck"),
    "interrupted": None,
}


def coroutines(task: asyncio.Task[Any]) -> Iterator[Any]:
    """Those that wait for each other, the outermost first; as far as Python shows them."""
    coroutine: Any = task.get_coro()
    while hasattr(coroutine, "cr_await"):
        yield coroutine
        coroutine = coroutine.cr_await


def name_of(task: asyncio.Task[Any]) -> str:
    """ "": it runs nothing of the product's now, or waits for tasks of its own."""
    name, last = "", ""
    for coroutine in coroutines(task):
        file, last = Path(coroutine.cr_code.co_filename), coroutine.__qualname__
        ours = file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] in PACKAGES
        function = coroutine.cr_code.co_name
        if ours and file.name != CONTAINMENT and function not in AROUND and not name:
            owner = coroutine.cr_frame.f_locals.get("self") if coroutine.cr_frame else None
            name = f"{type(owner).__name__}.{function}" if owner is not None else last
    return "" if last in OWN_TASKS else name.replace(".<locals>", "")


def tasks_of(process: Process | None) -> dict[str, list[asyncio.Task[Any]]]:
    """The waiting tasks of a simulated process by their names; None: of all."""
    found: dict[str, list[asyncio.Task[Any]]] = {}
    for task in sorted(asyncio.all_tasks(), key=lambda task: getattr(task, "_number", 0)):
        mine = process is None or getattr(task, "process", None) is process
        if mine and (name := name_of(task)) and _can_be_struck(task):
            found.setdefault(name, []).append(task)
    return found


def _can_be_struck(task: asyncio.Task[Any]) -> bool:
    waiter = waited_for(task)
    return waiter is not None and not isinstance(waiter, asyncio.Task) and not waiter.done()


def strike(task: asyncio.Task[Any], kind: str) -> None:
    waiter = waited_for(task)
    assert waiter is not None
    if (error := ERRORS[kind]) is None:
        waiter.cancel()
    else:
        waiter.set_exception(error())


@dataclass(frozen=True)
class Row:
    """`ends`: as the table's heading of the column says it."""

    group: str
    names: tuple[str, ...]
    ends: str


def table() -> list[Row]:
    """The rows of ARCHITECTURE.md: | group | `task`, `task` | what an error ends |."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    part = text[text.index(TITLE) :].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines()]
    rows = [row for row in cells if len(row) == 3 and "`" in row[1]]
    return [Row(group, tuple(re.findall("`([^`]+)`", tasks)), ends) for group, tasks, ends in rows]


def names_in(groups: Iterable[str]) -> dict[str, str]:
    """Task -> what its errors end, of these groups."""
    wanted = set(groups)
    return {name: row.ends for row in table() if row.group in wanted for name in row.names}

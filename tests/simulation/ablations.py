"""Safeguards, each of which can be switched off: the simulation must then find a broken promise (style.md, 17).

Each is the product's own small function, replaced while the block runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from master_service.core.tasks import TaskQueue
from master_service.transact import Transactor
from pserver_service.core.accumulator import Accumulator
from pserver_service.core.blocks import Verdict
from pserver_service.core.ledger import Ledger
from pserver_service.service import Pserver


@contextlib.contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    original = vars(owner)[name]  # a static method stays one
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)


def no_term_fence() -> Any:
    """A master writes whether or not it still holds the lock."""
    return replaced(Transactor, "fence", lambda _: [])


def no_attempt_fence() -> Any:
    """Any report about a task is taken, whoever sends it."""
    return replaced(TaskQueue, "check_attempt", lambda *_: None)


def no_generation_fence() -> Any:
    """Pushes of trainers that were put out are applied."""
    return replaced(Pserver, "is_stale", lambda *_: False)


def no_tree_dedup() -> Any:
    """A node that is in the tree already is added again."""
    return replaced(Accumulator, "covers", lambda *_: False)


def no_ledger_dedup() -> Any:
    """A minibatch that was applied is applied again."""
    judge = Ledger.judge

    def judged(self: Ledger, push: Any, task: int, block: int) -> Verdict:
        verdict = judge(self, push, task, block)
        return Verdict.APPLIED if verdict is Verdict.DUPLICATE and self._books(push.epoch) is not None else verdict

    return replaced(Ledger, "judge", judged)


ABLATIONS: dict[str, Callable[[], Any]] = {
    "term": no_term_fence,
    "attempt": no_attempt_fence,
    "generation": no_generation_fence,
    "tree": no_tree_dedup,
    "ledger": no_ledger_dedup,
}

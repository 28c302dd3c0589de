"""Logs of simulated processes: silent, or (verbose) with virtual time and the process that spoke."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import structlog

from tests.equipment.virtual_loop import current_process


def discard(_: str) -> None:
    """Says nothing."""


@contextlib.contextmanager
def configured(say: Callable[[str], None]) -> Iterator[None]:
    """All logs go to `say` while the block runs; the configuration before is restored."""

    def render(_logger: Any, _name: str, event: dict[str, Any]) -> str:
        process, level, what = current_process(), event.pop("level", ""), event.pop("event")
        event.pop("room", None)
        fields = " ".join(f"{name}={value}" for name, value in event.items())
        return f"{_now():9.3f} {process.name if process else '-':<14} {level:<7} {what} {fields}"

    class Printer:
        def msg(self, message: str) -> None:
            say(message)

        debug = info = warning = error = critical = exception = log = msg

    before = structlog.get_config()
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.format_exc_info, render],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.CRITICAL if say is discard else logging.DEBUG
        ),
        logger_factory=lambda *_: Printer(),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**before)


def _now() -> float:
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return 0.0

"""Logs as events with bound fields: `log.info("task_requeued", task=7, attempt=3, cause="…")`. JSON lines unless stderr is a terminal."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


def configure(*, level: str = "INFO", json: bool | None = None, **bound: Any) -> None:
    """Log to stderr from now on; `bound` (service, member, …) goes into every line. `json` None: unless stderr is a terminal."""
    as_json = (not sys.stderr.isatty()) if json is None else json
    threshold = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info if as_json else structlog.dev.set_exc_info,
            structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=max(threshold, logging.WARNING), stream=sys.stderr, force=True)
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**bound)


def logger(room: str) -> structlog.stdlib.BoundLogger:
    """The logger of one module; `room`, its short name, is in each line."""
    bound: structlog.stdlib.BoundLogger = structlog.get_logger(room=room)  # lazy: follows a later `configure`
    return bound

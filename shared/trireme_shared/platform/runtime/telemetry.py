"""Logs as events with bound fields: `log.info("task_requeued", task=7, attempt=3, cause="…")`. JSON lines
unless stderr is a terminal."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, TextIO, cast

import structlog

from trireme_shared.platform.runtime import clock
from trireme_shared.platform.runtime.output import Unfailing
from trireme_shared.protocol.urls import without_passwords


class _WithoutPasswords(Unfailing):
    """Of logs: see `without_passwords`. Each write is a whole line, on a line of its own: one that a script
    has left open is ended first."""

    def write(self, text: str) -> int:
        begun = [each for each in (sys.stdout, sys.stderr) if isinstance(each, Unfailing) and each.is_open]
        for stream in begun:
            stream.is_open = False
        super().write(("\n" if begun else "") + without_passwords(text))
        return len(text)


class Tally:
    """How often something happened that others cause: a line for each would let them fill the disk."""

    def __init__(self) -> None:
        self._count, self._told_at = 0, -math.inf

    def add(self) -> None:
        self._count += 1

    def due(self, every_s: float) -> int:
        """How many to tell of now, since the last time; 0: none, or the last time was not `every_s` seconds
        ago."""
        now = clock.monotonic()
        if not self._count or now - self._told_at < every_s:
            return 0
        count, self._count, self._told_at = self._count, 0, now
        return count


def unfailing_output() -> None:
    """From now on a `print`, of a user's script for example, raises nothing if it cannot be written: a full
    disk is no error of the script."""
    sys.stdout, sys.stderr = cast("TextIO", Unfailing(sys.stdout)), cast("TextIO", Unfailing(sys.stderr))


def configure(*, level: str = "INFO", json: bool | None = None, **bound: Any) -> None:
    """Log to stderr from now on; `bound` (service, member, …) goes into every line. `json` None: unless
    stderr is a terminal."""
    as_json = (not sys.stderr.isatty()) if json is None else json
    threshold = logging.getLevelNamesMapping()[level.upper()]
    stream = cast("TextIO", _WithoutPasswords(sys.stderr))
    structlog.configure(
        processors=[
            # a context variable would not be there in threads
            lambda _logger, _method, event: {**bound, **event},
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info if as_json else structlog.dev.set_exc_info,
            structlog.processors.JSONRenderer()
            if as_json
            # no values of variables: some are secrets
            else structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=max(threshold, logging.WARNING), stream=stream, force=True)
    # a traceback for each request that is no HTTP: peers could fill the disk; errors of ours are told by the
    # guard of the routes
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)


def only_warnings() -> None:
    """Of a library in somebody else's program: warnings to stderr, as long as nobody has configured logs."""
    if not structlog.is_configured():
        structlog.configure(
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.format_exc_info,
                structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
            ],
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _WithoutPasswords(sys.stderr))),
            cache_logger_on_first_use=False,
        )


def logger(room: str) -> structlog.stdlib.BoundLogger:
    """The logger of one module; `room`, its short name, is in each line."""
    bound: structlog.stdlib.BoundLogger = structlog.get_logger(room=room)  # lazy: follows a later `configure`
    return bound


_SECRET = re.compile(r"KEY|TOKEN|PASSWORD|SECRET|CREDENTIAL")
SHORTEST = 6  # shorter values would blot out words


def hidden(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """As `without_passwords`, and without the values of variables whose names say that they are secret."""
    for name, value in environment.items():
        if len(value) >= SHORTEST and _SECRET.search(name.upper()) and value in text:
            text = text.replace(value, "***")
    return without_passwords(text)


def without_user(addresses: str) -> str:
    """Addresses of etcd, with commas between, without what stands before @ in them: who wants to log in gives
    user and password beside the address, and these would be shown. A path of a UNIX socket may have an @."""
    return ",".join(map(_bare, addresses.split(",")))


def _bare(address: str) -> str:
    scheme, mark, rest = address.partition("://") if "://" in address else ("", "", address)
    return address if scheme.strip().endswith("unix") else f"{scheme}{mark}{rest.rpartition('@')[2]}"

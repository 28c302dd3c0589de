"""Cron expressions: five fields, as Debian's cron reads them, in a time zone. Times are seconds since 1970;
no clock is read here.

Where clocks are put forward, what would have run in the missing hour runs right after it; where they are put
back, it runs once.
"""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

CHARACTERS = 200


def next_time(expression: str, zone: str, after: float) -> float:
    """The first time later than `after`. Raises ValueError: it is no expression, no zone, or there is no such
    time."""
    return _first(expression, datetime.fromtimestamp(after, _zone(zone)), reverse=False)


def latest_time(expression: str, zone: str, until: float) -> float:
    """The last time that is not later than `until`. Raises ValueError as above."""
    return _first(expression, datetime.fromtimestamp(int(until) + 1, _zone(zone)), reverse=True)


def _first(expression: str, start: datetime, *, reverse: bool) -> float:
    if len(expression) > CHARACTERS or len(expression.split()) != 5:
        msg = (
            f"{expression[:CHARACTERS]!r} is no cron expression: it has {len(expression.split())} fields and "
            f"{len(expression)} characters; write minute, hour, day of month, month and day of "
            "week, as in '0 6 * * 1'"
        )
        raise ValueError(msg)
    try:
        return next(CronSim(expression, start, reverse=reverse)).timestamp()
    except CronSimError as error:
        msg = f"{expression!r} is no cron expression, or names a day that no month has ({error})"
        raise ValueError(msg) from error
    except StopIteration:
        msg = f"{expression!r} names no time at all"
        raise ValueError(msg) from None


def _zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        msg = f"time zone {name!r} is not known here ({error}); write UTC or a name such as Europe/Berlin"
        raise ValueError(msg) from error

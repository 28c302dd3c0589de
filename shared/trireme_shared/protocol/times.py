"""Points in time that users name, as RFC 3339 texts, and as seconds since 1970. No clock is read here."""

from __future__ import annotations

from datetime import UTC, datetime


def instant(text: str) -> float:
    """Seconds since 1970 of an RFC 3339 time. Raises ValueError if it is none, or has no time zone."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        msg = f"{text!r} is no time with a zone: write it as 2027-01-31T06:00:00Z"
        raise ValueError(msg)
    return found.timestamp()


def rfc3339(seconds: float) -> str:
    """UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def compact(seconds: float) -> str:
    """`202701150600`: UTC, to the minute."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y%m%d%H%M")

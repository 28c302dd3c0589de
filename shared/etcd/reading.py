"""Values found in etcd, which anybody may have written: another version of this program, a person, another program.

`read_record`: of members, wishes, information: whoever follows a prefix goes on without what it cannot read
`must_read`, `understood`: of the job itself: guessing would lose records, so it ends loudly and names the key
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from pydantic import ValidationError

from shared.errors import NotFound, StateUnreadable
from shared.records.record import Record
from shared.runtime import telemetry

SHOWN_BYTES = 100

log = telemetry.logger("reading")

T = TypeVar("T", bound=Record)


def read_record(kind: type[T], key: str, value: bytes | None) -> T | None:
    """None: there is no value, or it is no such record (which is logged)."""
    if value is None:
        return None
    try:
        return kind.model_validate_json(value)
    except ValidationError as error:
        log.warning("value_unreadable", key=key, bytes=len(value), cause=str(error))
        return None


def read_number(key: str, value: bytes | None) -> int | None:
    """None: there is no value, or it is no decimal text (which is logged)."""
    if value is None:
        return None
    try:
        return int(value)
    except ValueError:
        log.warning("value_unreadable", key=key, value=value[:SHOWN_BYTES], cause="not an integer")
        return None


def must_read(kind: type[T], key: str, value: bytes) -> T:
    """Raises StateUnreadable."""
    with understood(key, value):
        return kind.model_validate_json(value)


@contextmanager
def understood(key: str, value: bytes) -> Iterator[None]:
    """Around what makes sense of a value of the job's own. Raises StateUnreadable for what it does not understand."""
    try:
        yield
    except (ValueError, LookupError, NotFound) as error:
        msg = f"{key} in etcd cannot be understood: {value[:SHOWN_BYTES]!r}: {error}"
        hint = "was it written by another version of Trireme, or by hand? Put its old value back, or start a new job"
        raise StateUnreadable(msg, hint=hint, key=key) from error

"""Reading values in etcd, which any program, another version of this program or a person may have written.

`read_record`: for members, requests and information. A value that cannot be read is skipped.
`must_read`, `understood`: for the job itself. A guess could lose records, so an error names the key and ends the process.
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
    """None: there is no value, or it is not such a record (this is logged)."""
    if value is None:
        return None
    try:
        return kind.model_validate_json(value)
    except ValidationError as error:
        log.warning("value_unreadable", key=key, bytes=len(value), cause=str(error))
        return None


def read_number(key: str, value: bytes | None) -> int | None:
    """None: there is no value, or it is not decimal text (this is logged)."""
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
    """Use it around code that parses a value of the job itself. Raises StateUnreadable if the code fails."""
    try:
        yield
    except (ValueError, LookupError, NotFound) as error:
        msg = f"{key} in etcd cannot be understood: {value[:SHOWN_BYTES]!r}: {error}"
        hint = "was it written by another version of Trireme, or by hand? Put its old value back, or start a new job"
        raise StateUnreadable(msg, hint=hint, key=key) from error

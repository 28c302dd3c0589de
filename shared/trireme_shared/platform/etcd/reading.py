"""Reading values in etcd, which any program, another version of this program or a person may have written.

`read_record`: for members, requests and information. A value that cannot be read is skipped. `must_read`,
`understood`: for the job itself. A guess could lose records, so an error names the key and ends the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from pydantic import ValidationError

from trireme_shared.platform.etcd.client import Etcd
from trireme_shared.platform.etcd.errors import Compacted
from trireme_shared.platform.etcd.operations import KeyValue, Put
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import NotFound, NotReady, StateUnreadable
from trireme_shared.protocol.records.record import Record, misfits
from trireme_shared.protocol.records.state_schema import StateSchema

SHOWN_BYTES = 100
PAGE = 500
READS = 5

log = telemetry.logger("reading")

T = TypeVar("T", bound=Record)


def read_record(kind: type[T], key: str, value: bytes | None) -> T | None:
    """None: there is no value, or it is not such a record (this is logged)."""
    if value is None:
        return None
    try:
        return kind.from_bytes(value)
    except ValidationError as error:
        log.warning("value_unreadable", key=key, bytes=len(value), cause=misfits(error))
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
        return kind.from_bytes(value)


@contextmanager
def understood(key: str, value: bytes) -> Iterator[None]:
    """Use it around code that parses a value of the job itself. Raises StateUnreadable if the code fails."""
    try:
        yield
    except (ValueError, LookupError, NotFound) as error:
        msg = f"{key} in etcd cannot be understood: {value[:SHOWN_BYTES]!r}: {misfits(error)}"
        hint = (
            "was it written by another version of Trireme, or by hand? Put its old value back, or "
            "start a new job"
        )
        raise StateUnreadable(msg, hint=hint, key=key) from error


def schema_to_write(key: str, found: KeyValue | None) -> list[Put]:
    """What a leader writes at `key` about the form of its keys; nothing if that or a later form is there.
    Raises StateUnreadable if this program does not know the form."""
    known = must_read(StateSchema, key, found.value) if found is not None else None
    if known is not None:
        known.check(key)
    own = StateSchema.own()
    return [Put(key, own.to_bytes())] if known is None or known.schema_version < own.schema_version else []


async def read_below(etcd: Etcd, prefix: str, page: int = PAGE) -> tuple[dict[str, KeyValue], int]:
    """The keys and their revision. `prefix` ends with `/`. Raises PeerError."""
    for _ in range(READS):
        try:
            return await read_at(etcd, prefix, page=page)
        except Compacted as error:  # its history was deleted between two pages
            log.warning("reading_begins_again", cause=error.message)
    raise NotReady(f"etcd deleted the history of {prefix} {READS} times while it was read; try again")


async def read_at(
    etcd: Etcd, prefix: str, revision: int = 0, *, page: int = PAGE
) -> tuple[dict[str, KeyValue], int]:
    """The keys at that revision (0: now), and the revision. `prefix` ends with `/`. Raises Compacted,
    PeerError."""
    found: dict[str, KeyValue] = {}
    first, end = prefix, prefix[:-1] + "0"  # "0" follows "/"
    while True:
        some = await etcd.range(first, end, limit=page, revision=revision)
        revision = revision or some.revision
        found.update((kv.key, kv) for kv in some.kvs)
        if not some.more:
            return found, revision
        first = some.kvs[-1].key + "\0"

"""Rows of embedding tables: lookups over streams, and whole tables in portions.

LookupRequest ─► ids ─► wait until the tables have the version ─► read, some rows a turn of the event loop
    ─► rows, LookupEnd
TableRequest ─► rows of some slots, TableEnd
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import BadFrame, Gone, InvalidArgument, NotReady, TooLarge, TriremeError
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.wire.messages import LookupEnd, LookupRequest, TableEnd, TableRequest, Verdict
from trireme_shared.serving.block_server import BlockServer
from trireme_shared.serving.core.store import Store
from trireme_shared.tables.payload import MOST_BYTES, ids_in, size_of

if TYPE_CHECKING:
    from trireme_shared.protocol.records import SlotMap
    from trireme_shared.serving.core.table.rows import RowsReading, TableRows  # loads numba

MOST_WAIT_S = 60.0
Found = tuple[memoryview, LookupEnd]  # a payload of rows, and what is said of them


class OpenLookup:
    """`wake` is called when it is worth to ask for `answer` again. Close it at the end. Raises
    InvalidArgument, BadFrame, NotReady, LayoutMismatch."""

    def __init__(
        self, pserver: BlockServer, request: LookupRequest, payload: memoryview, wake: Callable[[], None]
    ) -> None:
        self._pserver, self._request, self._wake = pserver, request, wake
        self._store = pserver.loaded()
        self._rows = tables_in(self._store)
        _check_version(self._store, request.version)
        self._ids = ids_in(payload, request.rows, self._rows.dims, rows=False)
        self._version = request.version  # that is read; once it has begun, in a synchronous job, a number
        self._reading: RowsReading | None = None
        self._end, self._turn_comes = LookupEnd(code="OK"), False
        self._own_by: tuple[SlotMap | None] | None = None  # by which map all ids are its own
        self.deadline = clock.monotonic() + min(max(request.wait_s, 0.0), MOST_WAIT_S)
        pserver.lookups.append(wake)

    def __repr__(self) -> str:
        return f"<OpenLookup of version {self._request.version}: {sum(self._request.rows)} ids>"

    @property
    def begun(self) -> bool:
        """Whether some of its rows are read."""
        return self._reading is not None

    def answer(self, *, expired: bool = False) -> Found | LookupEnd | None:
        """Rows, or why there are none; None: not yet. `expired`: it has waited until its deadline, whatever
        the clock says: that of an event loop may be a moment ahead."""
        rows = self._rows
        if self._pserver.store is not self._store:
            return LookupEnd(code="NOT_READY", message="the job is being rolled back")
        if self._request.generation < self._pserver.timeline:
            message = f"the job was rolled back in generation {self._pserver.timeline}: join again"
            return LookupEnd(code="GONE", message=message)
        found = rows.judge(self._version)
        if found is Verdict.GONE and self._request.version is None:  # steps were faster: from the beginning
            self._version, self._reading = None, None
            found = rows.judge(None)
        version = self._version
        if found is Verdict.TOO_EARLY and (expired or clock.monotonic() >= self.deadline):
            message = f"the tables have not reached version {version} (they are at {rows.version}): ask again"
            return LookupEnd(code="TOO_EARLY", message=message)
        if found is Verdict.TOO_EARLY:
            return None
        if found is not None:
            return LookupEnd(
                code="GONE",
                message=f"the tables are at version {rows.version}, {version} was asked: join again",
            )
        if self._own_by != (self._store.slots,):
            if not rows.are_owned(self._ids, self._store.slots, self._pserver.index):
                return LookupEnd(
                    code="WRONG_OWNER",
                    message="an id is at another parameter server: read the slot map again",
                )
            self._own_by = (self._store.slots,)
        try:
            return self._read()
        except OverflowError as error:
            return LookupEnd(code="OVERFLOW", message=f"a row of the tables: {error}")

    def _read(self) -> Found | None:
        """One turn. Raises OverflowError."""
        from trireme_shared.serving.core.table.rows import RowsReading  # noqa: PLC0415  loads numba

        if self._turn_comes:  # something else woke it
            return None
        if self._reading is None:
            if self._store.mode is Mode.SYNC and self._version is None:
                self._version = self._rows.version
            self._end = found_end(self._pserver)
            self._reading = RowsReading(self._rows, self._version, self._ids, self._request.dtype)
        if self._reading.go_on():
            return self._reading.payload, self._end
        self._turn_comes = True
        asyncio.get_running_loop().call_soon(self._next_turn)
        return None

    def _next_turn(self) -> None:
        self._turn_comes = False
        self._wake()

    def close(self) -> None:
        if self._wake in self._pserver.lookups:
            self._pserver.lookups.remove(self._wake)


def found_end(pserver: BlockServer) -> LookupEnd:
    """Of rows that are read now."""
    store = pserver.loaded()
    return LookupEnd(code="OK", version=tables_in(store).version if store.mode is Mode.ASYNC else None)


def tables_in(store: Store) -> TableRows:
    """Raises InvalidArgument: the job has none."""
    if store.rows is None:
        raise InvalidArgument("rows were asked for in a job without embedding tables")
    return store.rows


def _check_version(store: Store, version: int | None) -> None:
    """Raises InvalidArgument."""
    if version is not None and store.mode is Mode.ASYNC:
        msg = (
            f"rows of version {version} were asked for in async mode, where rows have no common "
            "version: ask for None"
        )
        raise InvalidArgument(msg)


def ids_bytes(pserver: BlockServer, request: LookupRequest) -> int:
    """Of the payload that has to follow. Raises NotReady, InvalidArgument, BadFrame, LayoutMismatch."""
    pserver.check(request)
    dims = tables_in(pserver.loaded()).dims
    size_of(request.rows, dims, ids=False, rows=True, dtype=request.dtype)  # of the answer
    return size_of(request.rows, dims, ids=True, rows=False)


def portion(pserver: BlockServer, request: TableRequest) -> tuple[TableEnd, memoryview]:
    """Some rows of a whole table. Raises NotReady, WrongOwner, Gone, InvalidArgument, BadFrame,
    LayoutMismatch."""
    pserver.check(request)
    if (answer := pserver.table_portion(request)) is not None:
        return answer
    store = pserver.loaded()
    rows = tables_in(store)
    if request.generation < pserver.timeline:
        msg = (
            f"the job was rolled back in generation {pserver.timeline}, this is of "
            f"{request.generation}: join again"
        )
        raise NotReady(msg)
    pserver.check_map(store, request.slots)
    _check_version(store, request.version)
    version = rows.version if request.version is None else request.version
    if not rows.even or version > rows.version:
        msg = f"the tables have not reached version {version} (they are at {rows.version}): ask again"
        raise NotReady(msg)
    if version < rows.version:
        raise Gone(
            f"the tables are at version {rows.version}, {version} was asked: whole tables are read "
            "at the newest"
        )
    total = rows.rows_in_table(request.table)
    count, payload, following, part = rows.portion(request.table, request.first, request.part)
    return TableEnd(rows=count, next=following, part=part, total=total), payload


@dataclass(slots=True)
class _Lookup:
    """`size`: bytes of the ids. `refused`: its ids and its end may still come."""

    request: LookupRequest
    size: int
    memory: memoryview | None = None
    refused: bool = False
    opened: OpenLookup | None = None
    expiry: asyncio.TimerHandle | None = None
    expired: bool = False


@dataclass(slots=True)
class StreamLookups:
    """Those of one stream. For each either `refuse` is called or `send(number, rows or None, end)`, once, and
    only while `may_send()`: what was sent may still lie in this process. One at a time is read, so that the
    rows of one alone wait to be sent."""

    pserver: BlockServer
    send: Callable[[int, memoryview | None, LookupEnd], None]
    refuse: Callable[[int, TriremeError], None]
    may_send: Callable[[], bool]
    _open: dict[int, _Lookup] = field(default_factory=dict)
    _begun: int | None = None

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, number: object) -> bool:
        return number in self._open

    def begin(self, number: int, request: LookupRequest) -> None:
        """The ids follow, and the end, even if it is refused."""
        lookup = self._open[number] = _Lookup(request, 0, refused=True)
        try:
            size = ids_bytes(self.pserver, request)
            if sum(each.size for each in self._open.values()) + size > MOST_BYTES:
                raise TooLarge(f"lookups of more than {MOST_BYTES} bytes of ids at once: await their answers")
        except TriremeError as error:
            self.refuse(number, error)
        else:
            lookup.size, lookup.refused = size, False

    def place(self, number: int, size: int) -> memoryview | None:
        """Memory for the ids; None: it is refused. Raises BadFrame."""
        lookup = self._open.get(number)
        if lookup is not None and lookup.refused:
            return None
        if lookup is None or lookup.memory is not None or lookup.size != size:
            msg = f"{size} bytes of ids that belong to no lookup, or are not as many as it says"
            raise BadFrame(msg)
        lookup.memory = memoryview(bytearray(size))
        return lookup.memory

    def end(self, number: int) -> None:
        """The ids are there."""
        if self._open[number].refused:
            self._drop(number)
            return
        try:
            self._ask(number, self._open[number])
        except TriremeError as error:
            self._drop(number)
            self.refuse(number, error)

    def _ask(self, number: int, lookup: _Lookup) -> None:
        """Raises as OpenLookup."""
        if (lookup.memory is None and lookup.size) or lookup.opened is not None:
            raise BadFrame("a lookup ended without its ids, or twice")
        ids = memoryview(b"") if lookup.memory is None else lookup.memory
        lookup.opened = OpenLookup(self.pserver, lookup.request, ids, lambda: self._look(number))
        wait_s = lookup.opened.deadline - clock.monotonic()
        lookup.expiry = asyncio.get_running_loop().call_later(wait_s, self._expire, number)
        self._look(number)

    def _drop(self, number: int) -> None:
        """It is over."""
        lookup = self._open.pop(number, None)
        if self._begun == number:
            self._begun = None
            asyncio.get_running_loop().call_soon(self.on_writable)
        if lookup is not None and lookup.opened is not None:
            lookup.opened.close()
        if lookup is not None and lookup.expiry is not None:
            lookup.expiry.cancel()

    def on_writable(self) -> None:
        for number in tuple(self._open):
            self._look(number)

    def close(self) -> None:
        for number in tuple(self._open):
            self._drop(number)

    def _expire(self, number: int) -> None:
        if (lookup := self._open.get(number)) is not None:
            lookup.expired = True
            self._look(number)

    def _look(self, number: int) -> None:
        lookup = self._open.get(number)
        if lookup is None or lookup.opened is None or not self.may_send():
            return
        if self._begun not in (None, number):
            return
        if (found := lookup.opened.answer(expired=lookup.expired)) is None:
            self._begun = number if lookup.opened.begun else None
            return
        self._drop(number)
        self.send(number, *((None, found) if isinstance(found, LookupEnd) else found))

"""Frames of the data plane: a stream of msgpack objects that any msgpack library can read.

    body = header map, then per block [header map, bin], then end map {"end": true, ...}

    feed --> Opened(header) --> place(header, size) -> memory --> Filled(header, memory) ... --> Ended(header)

The end map makes truncation visible. On an upgraded stream
(shared/trireme_shared/serving/transport/stream.py) the same maps and blocks follow each other without end;
their `id` says which request they belong to. There the headers of all steps are equal byte for byte, so the
bytes before a payload are parsed and checked once and then recognised. The decoder does no I/O and never
allocates memory for a payload: it calls `place` for memory once it knows a block's header and length, and
checks all bounds before that. The decoder changes no state of a service, so a malformed frame cannot change
any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

import msgpack
from pydantic import ValidationError

from trireme_shared.protocol.errors import BadFrame, TooLarge
from trireme_shared.protocol.records import Record
from trireme_shared.protocol.records.record import misfits

CONTENT_TYPE = "application/msgpack"
Fields = dict[str, Any]
Place = Callable[[Any, int], memoryview | None]
Prepare = Callable[[Fields], Any]
AnyRecord = TypeVar("AnyRecord", bound=Record)

_PAIR, _BIN8, _BIN16, _BIN32 = 0x92, 0xC4, 0xC5, 0xC6
_BIN_LENGTH_BYTES = {_BIN8: 1, _BIN16: 2, _BIN32: 4}
_SKIPPED = memoryview(bytearray(64 << 10))  # receives the payloads of skipped blocks
# headers that are remembered: longest, and how many
KNOWN_BYTES, KNOWN_HEADERS = 128, 8192
PASSING = ("result", "rows")  # fields of block headers that differ each time: they are not remembered
# bytes of a chunk that are searched for a header at a time, so at most this much is copied beyond the header
_PORTION_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one body: bytes of the first header, of a block's header or the end map, of a payload; number
    of blocks."""

    payload_bytes: int
    blocks: int
    header_bytes: int = 4 << 20
    #: with the metrics of a node, and what 60,000 parameters that are frozen in turns take
    block_header_bytes: int = 1 << 19


@dataclass(frozen=True, slots=True)
class Opened:
    header: Fields


@dataclass(frozen=True, slots=True)
class Filled:
    """A block is complete; `payload` is the memory that `place` gave, `header` as it was prepared."""

    header: Any
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Ended:
    header: Fields


Event = Opened | Filled | Ended


class _State(Enum):
    OBJECT = auto()  # the first byte of the next object
    MAP = auto()
    LENGTH = auto()  # type and length of a bin
    PAYLOAD = auto()
    ENDED = auto()
    FAILED = auto()


# ---------------------------------------------------------------- writing


def plain(fields: Mapping[str, Any] | Record) -> Fields:
    """The fields of a record that are sent."""
    return fields.model_dump(exclude_none=True) if isinstance(fields, Record) else dict(fields)


def encode(fields: Mapping[str, Any] | Record) -> bytes:
    """One msgpack map: a message header, or a whole message without blocks."""
    packed: bytes = msgpack.packb(plain(fields))
    return packed


def encode_block(fields: Mapping[str, Any] | Record, size: int) -> bytes:
    """The bytes before a payload of `size` bytes; the payload follows as it is in memory."""
    if size < 1 << 8:
        length = bytes((_BIN8, size))
    elif size < 1 << 16:
        length = bytes((_BIN16, *size.to_bytes(2, "big")))
    else:
        length = bytes((_BIN32, *size.to_bytes(4, "big")))
    return bytes((_PAIR,)) + encode(fields) + length


def encode_end(fields: Mapping[str, Any] | Record | None = None) -> bytes:
    return encode({"end": True, **plain(fields or {})})


# ---------------------------------------------------------------- reading


def decode(body: bytes | bytearray | memoryview, limit: int = 4 << 20) -> Fields:
    """A message without blocks: exactly one map. Raises BadFrame, TooLarge."""
    if len(body) > limit:
        msg = f"message of {len(body)} bytes: the limit is {limit}"
        raise TooLarge(msg)
    reader = _MapReader(limit)
    taken = reader.feed(memoryview(body))
    if reader.fields is None or taken != len(body):
        msg = (
            f"expected one msgpack map of {len(body)} bytes, found "
            f"{'more after' if reader.fields else 'only a part of'} it"
        )
        raise BadFrame(msg)
    return reader.fields


def read(kind: type[AnyRecord], fields: Fields) -> AnyRecord:
    """`fields` as a record. Raises BadFrame, which names the invalid fields."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        msg = f"not a {kind.__name__}: {misfits(error)}"
        raise BadFrame(msg) from error


class _MapReader:
    """Reads one map that comes in parts."""

    def __init__(self, limit: int) -> None:
        self.fields: Fields | None = None
        self._limit = limit
        self._fed = 0
        self._unpacker = msgpack.Unpacker(
            raw=False,
            read_size=_PORTION_BYTES,
            max_buffer_size=limit + _PORTION_BYTES,
            max_array_len=limit // 8,  # lists are allocated before their items are seen
            max_map_len=limit // 8,
            max_ext_len=0,
        )

    def feed(self, data: memoryview) -> int:
        """Returns how many bytes of `data` belong to the map; sets `fields` once the map is complete."""
        taken = 0
        while taken < len(data):
            portion = data[taken : taken + _PORTION_BYTES]
            self._unpacker.feed(portion)
            self._fed += len(portion)
            taken += len(portion)
            try:
                fields = self._unpacker.unpack()
            except msgpack.OutOfData:
                if self._fed > self._limit:
                    msg = f"a header of more than {self._limit} bytes"
                    raise TooLarge(msg) from None
                continue
            except (ValueError, msgpack.UnpackException, RecursionError, TypeError) as error:
                msg = f"a header is not msgpack: {type(error).__name__}: {error}"
                raise BadFrame(msg) from error
            if self._unpacker.tell() > self._limit:
                msg = f"a header of {self._unpacker.tell()} bytes: the limit is {self._limit}"
                raise TooLarge(msg)
            if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
                msg = f"a header is {type(fields).__name__}: expected a map with text keys"
                raise BadFrame(msg)
            self.fields = fields
            return taken - (self._fed - int(self._unpacker.tell()))
        return taken


class Decoder:
    """Decodes one body. `feed` it bytes as they come, or read directly into `vacant` and call `advance`; call
    `finish` at the end.

    `place(header, size)` returns writable memory of exactly `size` bytes for a block, or None to skip the
    block; it raises to refuse the body. Without it each payload gets new memory. After an error the decoder
    refuses everything. `endless`: maps and blocks in any order (`place` has to bound the number of blocks);
    each map is `Opened`. `prepare` turns a block's header into the argument of `place`, or raises to refuse
    it. Its result may depend on the header alone: it is remembered and used again for an equal header.
    """

    def __init__(
        self,
        limits: Limits,
        place: Place | None = None,
        *,
        endless: bool = False,
        prepare: Prepare | None = None,
    ) -> None:
        self.limits = limits  # may be changed between blocks: the header says what will come
        self._endless = endless
        self._prepare = prepare
        # bytes before a payload -> the prepared header and the payload's size
        self.known: dict[bytes, tuple[Any, int]] = {}
        self.lengths: list[int] = []  # their lengths, the newest first
        self._beginning = bytearray()  # the bytes of this block before its payload
        self._place = place or (lambda _header, size: memoryview(bytearray(size)))
        self._state = _State.OBJECT
        self._opened = endless
        self._in_block = False
        self._reader: _MapReader | None = None
        self._header: Any = {}
        self._length = bytearray()
        self._payload = memoryview(b"")
        self._filled = 0
        self._skip = 0  # bytes left of a skipped payload
        self.blocks = 0

    def __repr__(self) -> str:
        return f"<Decoder {self._state.name} after {self.blocks} blocks>"

    @property
    def between_blocks(self) -> bool:
        """Whether the next byte begins a block or a map; between blocks a sender may be computing."""
        return self._opened and self._state is _State.OBJECT

    @property
    def vacant(self) -> memoryview:
        """Memory for the next bytes of the current payload; empty between payloads (then use `feed`)."""
        if self._skip:
            return _SKIPPED[: self._skip]
        return self._payload[self._filled :] if self._state is _State.PAYLOAD else memoryview(b"")

    def advance(self, count: int) -> Filled | None:
        """`count` bytes were written to the start of `vacant`. Returns the block if it is complete and not
        skipped."""
        if self._skip:
            self._skip -= count
            if not self._skip:
                self._state, self._in_block = _State.OBJECT, False
            return None
        self._filled += count
        if self._filled < len(self._payload):
            return None
        event = Filled(self._header, self._payload)
        self._state, self._payload, self._in_block = _State.OBJECT, memoryview(b""), False
        return event

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Event]:
        """The events that `data` completes; consume them all before the next feed. Raises BadFrame, TooLarge,
        and errors of `place`."""
        view = memoryview(data).cast("B")
        try:
            while len(view):
                if self._state is _State.PAYLOAD:
                    vacant = self.vacant
                    count = min(len(vacant), len(view))
                    vacant[:count] = view[:count]
                    event: Event | None = self.advance(count)
                else:
                    count, event = self._step(view)
                view = view[count:]
                if event is not None:
                    yield event
        except Exception:
            self._state = _State.FAILED
            raise

    def finish(self) -> None:
        """The body is over. Raises BadFrame if it is incomplete."""
        if self._state is not _State.ENDED:
            msg = (
                f"the body broke off after {self.blocks} blocks (in {self._state.name}), before its "
                "end map; send it again"
            )
            raise BadFrame(msg)

    def _step(self, view: memoryview) -> tuple[int, Event | None]:
        """How many bytes of `view` were used, and the event they complete."""
        match self._state:
            case _State.OBJECT:
                return self._recognised(view) if view[0] == _PAIR and self.known else self._begin(view[0])
            case _State.MAP:
                assert self._reader is not None
                taken = self._reader.feed(view)
                if self._in_block and len(self._beginning) <= KNOWN_BYTES:
                    self._beginning += view[:taken]
                return taken, None if self._reader.fields is None else self._map(self._reader.fields)
            case _State.LENGTH:
                return self._bin_length(view)
            case _State.ENDED:
                msg = f"{len(view)} bytes after the end map"
                raise BadFrame(msg)
            case _:
                msg = "this body was already refused"
                raise BadFrame(msg)

    def _begin(self, first: int) -> tuple[int, None]:
        if first == _PAIR:
            if not self._opened:
                msg = "the body begins with a block: expected the message's header map"
                raise BadFrame(msg)
            self.blocks += 1
            if self.blocks > self.limits.blocks and not self._endless:
                msg = f"more than {self.limits.blocks} blocks in one body"
                raise TooLarge(msg)
            self._in_block, taken = True, 1
            self._beginning[:] = bytes((_PAIR,))
        elif 0x80 <= first <= 0x8F or first in {0xDE, 0xDF}:
            taken = 0
        else:
            msg = f"byte 0x{first:02x} begins neither a map nor a [header, bin] pair"
            raise BadFrame(msg)
        small = self._in_block if self._endless else self._opened
        limit = self.limits.block_header_bytes if small else self.limits.header_bytes
        self._state, self._reader = _State.MAP, _MapReader(limit)
        return taken, None

    def _map(self, fields: Fields) -> Event | None:
        self._reader = None
        if self._in_block:
            if any(name in fields for name in PASSING):
                self._beginning += bytes(KNOWN_BYTES)
            self._state, self._header = _State.LENGTH, self._prepare(fields) if self._prepare else fields
            return None
        if not self._opened or self._endless:
            self._state, self._opened = _State.OBJECT, True
            return Opened(fields)
        if fields.get("end") is not True:
            msg = 'a map that is neither the first nor an end map ({"end": true})'
            raise BadFrame(msg)
        self._state = _State.ENDED
        return Ended({key: value for key, value in fields.items() if key != "end"})

    def _bin_length(self, view: memoryview) -> tuple[int, Filled | None]:
        kind = self._length[0] if self._length else view[0]
        if kind not in _BIN_LENGTH_BYTES:
            msg = f"byte 0x{kind:02x} after a block's header: expected its payload as a bin"
            raise BadFrame(msg)
        needed = 1 + _BIN_LENGTH_BYTES[kind] - len(self._length)
        part = view[:needed]
        self._length += part
        if len(part) < needed:
            return len(part), None
        size = int.from_bytes(self._length[1:], "big")
        if self._prepare is not None and size <= self.limits.payload_bytes:
            self._remember(bytes(self._beginning + self._length), size)
        self._length.clear()
        return len(part), self._begin_payload(size)

    def _begin_payload(self, size: int) -> Filled | None:
        if size > self.limits.payload_bytes:
            msg = f"a payload of {size} bytes: the limit is {self.limits.payload_bytes}"
            raise TooLarge(msg)
        place = self._place(self._header, size)
        if place is None:
            self._skip, self._state = size, _State.PAYLOAD if size else _State.OBJECT
            self._in_block = bool(size)
            return None
        assert place.nbytes == size, f"place for {size} bytes has {place.nbytes}"
        self._payload, self._filled, self._state = place.cast("B"), 0, _State.PAYLOAD
        return self.advance(0)

    def _remember(self, beginning: bytes, size: int) -> None:
        if len(beginning) > KNOWN_BYTES:
            return
        if len(self.known) >= KNOWN_HEADERS:
            self.known.clear()
            self.lengths.clear()
        self.known[beginning] = self._header, size
        if len(beginning) not in self.lengths:
            self.lengths.insert(0, len(beginning))

    def _recognised(self, view: memoryview) -> tuple[int, Filled | None]:
        """No sequence of bytes before a payload is a prefix of another one, so equal bytes mean an equal
        header."""
        for length in self.lengths:
            known = self.known.get(bytes(view[:length]))
            if known is not None:
                self.blocks += 1
                self._in_block = True
                self._header, size = known
                return length, self._begin_payload(size)
        return self._begin(view[0])

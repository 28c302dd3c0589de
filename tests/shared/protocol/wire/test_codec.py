"""The frame codec: golden bytes, any msgpack library reads them, any cut of the stream gives the same
events."""

import io
from contextlib import suppress
from itertools import pairwise

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme_shared.protocol.errors import BadFrame, TooLarge
from trireme_shared.protocol.wire import codec
from trireme_shared.protocol.wire.codec import Decoder, Ended, Filled, Limits, Opened
from trireme_shared.protocol.wire.messages import PulledBlock, PushBlock

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
LIMITS = Limits(payload_bytes=1 << 16, blocks=16, header_bytes=4096, block_header_bytes=512)

names = st.text(max_size=8)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | names
fields = st.dictionaries(
    names.filter(lambda name: name != "end"), scalars | st.lists(scalars, max_size=4), max_size=5
)
blocks = st.lists(st.tuples(fields, st.binary(max_size=400)), max_size=5)


def body_of(header, items, end=None) -> bytes:
    parts = [codec.encode(header)]
    for item, payload in items:
        parts += [codec.encode_block(item, len(payload)), payload]
    return b"".join([*parts, codec.encode_end(end)])


def decoded(pieces, limits=LIMITS):
    """(header, blocks, end) of a whole body."""
    decoder, events = Decoder(limits), []
    for piece in pieces:
        events += decoder.feed(piece)
    decoder.finish()
    opened, *filled, ended = events
    assert isinstance(opened, Opened)
    assert isinstance(ended, Ended)
    assert all(isinstance(event, Filled) for event in filled)
    return opened.header, [(event.header, bytes(event.payload)) for event in filled], ended.header


def cut(body: bytes, places: list[int]) -> list[bytes]:
    cuts = sorted({0, len(body), *(place % (len(body) + 1) for place in places)})
    return [body[first:last] for first, last in pairwise(cuts)]


def test_golden_bytes_of_a_body():
    body = body_of(
        {"step": 7, "job": "ctr"},
        [({"block": 3, "lanes": [0, 2], "count": 8}, b"\x01\x02\x03\x04")],
        {"code": "OK"},
    )
    assert body.hex(" ") == (
        "82 a4 73 74 65 70 07 a3 6a 6f 62 a3 63 74 72 "  # {"step": 7, "job": "ctr"}
        # [{"block": 3, "lanes": [0, 2], "count": 8},
        "92 83 a5 62 6c 6f 63 6b 03 a5 6c 61 6e 65 73 92 00 02 a5 63 6f 75 6e 74 08 "
        "c4 04 01 02 03 04 "  # bin of 4 bytes]
        "82 a3 65 6e 64 c3 a4 63 6f 64 65 a2 4f 4b"  # {"end": true, "code": "OK"}
    )


@given(fields, blocks, fields)
def test_any_msgpack_library_reads_what_is_written(header, items, end):
    read = list(msgpack.Unpacker(io.BytesIO(body_of(header, items, end)), raw=False))
    assert read == [header, *([item, payload] for item, payload in items), {"end": True, **end}]


@given(fields, blocks, fields, st.lists(st.integers(0, 10**6), max_size=20))
def test_any_cut_of_what_a_msgpack_library_writes_is_read(header, items, end, places):
    packed = [header, *([item, payload] for item, payload in items), {"end": True, **end}]
    body = b"".join(msgpack.packb(part) for part in packed)
    assert decoded(cut(body, places)) == (header, items, end)


def test_byte_by_byte_gives_the_same_events():
    items = [
        ({"block": number}, bytes([number]) * size) for number, size in enumerate([0, 1, 255, 256, 65535])
    ]
    body = body_of({"a": "x" * 300}, items, {"code": "OK"})
    assert decoded(bytes([byte]) for byte in body) == ({"a": "x" * 300}, items, {"code": "OK"})


@pytest.mark.parametrize("size", [0, 255, 256, 65535, 65536, 1 << 20])
def test_a_payload_length_takes_the_shortest_form(size):
    prefix = codec.encode_block(PulledBlock(block=1, version=2), size)
    assert prefix + bytes(size) == msgpack.packb([{"block": 1, "version": 2}, bytes(size)])


def test_payloads_are_received_into_the_place_that_is_given():
    target = np.zeros(8, np.float32)
    views = {0: memoryview(target[:5]), 1: memoryview(target[5:])}
    decoder = Decoder(LIMITS, lambda header, _size: views[header["block"]])
    data = np.arange(8, dtype=np.float32)
    body = body_of({}, [({"block": 1}, data[5:].tobytes()), ({"block": 0}, data[:5].tobytes())])
    for piece in cut(body, [1, 7, 9, 20, 21, 22, 35]):
        list(decoder.feed(piece))
    decoder.finish()
    assert target.tolist() == data.tolist()


def test_a_receiver_may_read_straight_into_the_vacant_memory():
    decoder = Decoder(LIMITS)
    payload = bytes(range(200))
    prefix = codec.encode({}) + codec.encode_block({"block": 0}, 200)
    assert list(decoder.feed(prefix + payload[:30])) == [Opened({})]
    assert len(decoder.vacant) == 170
    decoder.vacant[:100] = payload[30:130]
    assert decoder.advance(100) is None
    decoder.vacant[:] = payload[130:]
    event = decoder.advance(70)
    assert event is not None
    assert bytes(event.payload) == payload
    assert len(decoder.vacant) == 0
    assert list(decoder.feed(codec.encode_end())) == [Ended({})]


def test_several_blocks_in_one_chunk_may_share_one_memory():
    memory, seen = memoryview(bytearray(4)), []
    decoder = Decoder(LIMITS, lambda _header, size: memory[:size])
    for event in decoder.feed(body_of({}, [({}, b"aaaa"), ({}, b"bb"), ({}, b"cccc")])):
        seen += [bytes(event.payload)] if isinstance(event, Filled) else []
    assert seen == [b"aaaa", b"bb", b"cccc"]


def test_an_encoder_never_copies_payloads():
    assert len(codec.encode_block(PushBlock(block=1, count=3), 1 << 20)) < 64


# ---------------------------------------------------------------- what is refused

GOOD = body_of({"job": "ctr"}, [({"block": 0}, bytes(100)), ({"block": 1}, bytes(50))], {"code": "OK"})


@pytest.mark.parametrize("length", range(len(GOOD)))
def test_a_body_that_breaks_off_anywhere_is_noticed(length):
    with pytest.raises(BadFrame, match="broke off"):
        decoded([GOOD[:length]])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\x01", "begins neither"),
        (msgpack.packb([{}, b""]), "begins with a block"),
        (msgpack.packb({}) + msgpack.packb([1, b""]), "expected a map"),
        (msgpack.packb({}) + msgpack.packb([{}, "text"]), "expected its payload as a bin"),
        (msgpack.packb({}) + msgpack.packb([{}, b"", b""]), "begins neither"),
        (msgpack.packb({}) + msgpack.packb([{}]) + msgpack.packb({}), "begins neither"),
        (msgpack.packb({}) + msgpack.packb({"end": False}), "neither the first nor an end map"),
        (msgpack.packb({}) + msgpack.packb({}), "neither the first nor an end map"),
        (msgpack.packb({1: 2}), "not msgpack"),
        (msgpack.packb({b"raw": 2}), "text keys"),
        (b"\x81\xa1\xff\x01", "not msgpack"),
        (b"\x81\xa1a\xc1", "not msgpack"),
        (b"\x81\xa1a\xd4\x01\x00", "not msgpack"),
        (b"\xdf\xff\xff\xff\xff", "not msgpack"),
        (b"\x81\xa1a\xdd\xff\xff\xff\xff", "not msgpack"),
        (b"\x81\xa1a" + b"\x91" * 2000, "not msgpack"),
        (GOOD + b"\x00", "after the end map"),
    ],
)
def test_what_is_not_the_protocol_is_a_bad_frame(body, message):
    with pytest.raises(BadFrame, match=message):
        decoded([body])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (msgpack.packb({"a": "x" * 5000}), "header of|exceeds max"),
        (b"\x81\xa1a\xdb\x00\x00\x20\x00" + b"x" * 5000, "header of|exceeds max"),
        (msgpack.packb({}) + msgpack.packb([{"a": "x" * 600}, b""]), "header of|exceeds max"),
        (
            msgpack.packb({}) + msgpack.packb([{}, bytes((1 << 16) + 1)]),
            "payload of 65537 bytes: the limit is 65536",
        ),
        (msgpack.packb({}) + b"\x92\x80\xc6\xff\xff\xff\xff", "payload of 4294967295 bytes"),
        (msgpack.packb({}) + msgpack.packb([{}, b""]) * 17, "more than 16 blocks"),
    ],
)
def test_bounds_hold_before_anything_is_allocated(body, message):
    with pytest.raises((TooLarge, BadFrame), match=message):
        decoded([body])


def test_a_refused_body_stays_refused():
    decoder = Decoder(LIMITS)
    with pytest.raises(BadFrame):
        list(decoder.feed(b"\x01"))
    with pytest.raises(BadFrame, match="already refused"):
        list(decoder.feed(GOOD))
    with pytest.raises(BadFrame):
        decoder.finish()


def survive(body: bytes, places: list[int]) -> None:
    with suppress(BadFrame, TooLarge):
        decoded(cut(body, places))


@given(st.binary(max_size=2000), st.lists(st.integers(0, 10**6), max_size=5))
def test_random_bytes_are_read_or_refused(body, places):
    survive(body, places)


@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=6),
    st.lists(st.integers(0, 999)),
)
def test_damaged_bodies_are_read_or_refused(damage, places):
    body = bytearray(GOOD)
    for place, byte in damage:
        body[place] = byte
    survive(bytes(body), places)


@given(
    st.lists(
        st.sampled_from(
            [
                b"\x80",
                b"\x92",
                b"\x81\xa1a",
                b"\xc4\x02ab",
                b"\x91",
                b"\xde\x00\x01",
                b"\xc6\x00\x00\x00\x01",
                b"\xa1a",
            ]
        ),
        max_size=30,
    )
)
def test_scrambled_parts_are_read_or_refused(parts):
    survive(codec.encode({}) + b"".join(parts), [])


def test_a_message_is_exactly_one_map():
    assert codec.decode(codec.encode({"a": 1})) == {"a": 1}
    for body in (b"", b"\x81", codec.encode({"a": 1}) + b"\x80", b"\x90"):
        with pytest.raises(BadFrame):
            codec.decode(body)
    with pytest.raises(TooLarge):
        codec.decode(bytes(100), limit=99)


def test_a_record_with_wrong_fields_names_them():
    with pytest.raises(
        BadFrame, match=r"not a PushBlock: block: Input should be a valid integer.*; count: Field required"
    ):
        codec.read(PushBlock, {"block": "many"})


# ---------------------------------------------------------------- streams: maps and blocks without end


def events_of(decoder, body, piece):
    """Read as a transport does: straight into `vacant` where a payload is due, else `piece` bytes at a
    time."""
    found, at = [], 0
    while at < len(body):
        vacant = decoder.vacant
        count = min(len(vacant) or piece, len(body) - at)
        if vacant:
            vacant[:count] = body[at : at + count]
            event = decoder.advance(count)
            found += [event] if event is not None else []
        else:
            found += decoder.feed(body[at : at + count])
        at += count
    return [(type(event).__name__, event.header, bytes(getattr(event, "payload", b""))) for event in found]


@given(st.lists(st.tuples(fields, st.none() | st.binary(max_size=400)), max_size=8), st.integers(1, 700))
def test_an_endless_stream_gives_maps_and_blocks_in_any_order(items, piece):
    body, expected = b"", []
    for header, payload in items:
        if payload is None:
            body += codec.encode(header)
            expected.append(("Opened", header, b""))
        else:
            body += codec.encode_block(header, len(payload)) + payload
            expected.append(("Filled", header, payload))
    assert events_of(Decoder(LIMITS, endless=True), body, piece) == expected


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=400)), max_size=8), st.integers(1, 700))
def test_payloads_that_nobody_wants_are_skipped(items, piece):
    body = b"".join(
        codec.encode_block({"wanted": wanted}, len(payload)) + payload for wanted, payload in items
    )
    decoder = Decoder(
        LIMITS, lambda header, size: memoryview(bytearray(size)) if header["wanted"] else None, endless=True
    )
    found = events_of(decoder, body + codec.encode({"last": True}), piece)
    expected = [("Filled", {"wanted": True}, payload) for wanted, payload in items if wanted]
    assert found == [*expected, ("Opened", {"last": True}, b"")]
    assert decoder.between_blocks


def test_a_skipped_payload_may_be_larger_than_the_memory_it_passes_through():
    limits = Limits(payload_bytes=1 << 20, blocks=1)
    body = codec.encode_block({}, 300_000) + bytes(300_000) + codec.encode({"a": 1})
    assert events_of(Decoder(limits, lambda *_: None, endless=True), body, 100) == [("Opened", {"a": 1}, b"")]


def test_the_second_map_of_a_stream_has_the_limit_of_a_header():
    decoder = Decoder(LIMITS, endless=True)
    list(decoder.feed(codec.encode({"x": "y" * 4000}) * 2))
    with pytest.raises(TooLarge, match="limit is 512"):
        list(decoder.feed(codec.encode_block({"x": "y" * 600}, 4)))


sizes = st.sampled_from([0, 5, 200, 60_000])


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 3), sizes), max_size=30), st.lists(st.integers(0))
)
def test_headers_that_come_again_are_recognised_and_say_the_same(items, places):
    prepared = []

    def prepare(header):
        prepared.append(header)
        return header["block"], header["count"]

    body = b"".join(
        codec.encode_block({"block": b, "count": c}, size) + bytes([c]) * size for b, c, size in items
    )
    decoder = Decoder(LIMITS, endless=True, prepare=prepare)
    found = [event for piece in cut(body, places) for event in decoder.feed(piece)]
    assert [(event.header, bytes(event.payload)) for event in found] == [
        ((b, c), bytes([c]) * s) for b, c, s in items
    ]
    if not places:
        assert len(prepared) == len(set(items))


def test_a_header_that_came_with_a_small_payload_is_parsed_again_for_a_larger_one_which_is_refused():
    decoder = Decoder(LIMITS, endless=True, prepare=dict)
    list(decoder.feed(codec.encode_block({"block": 1}, 8) + bytes(8)))
    with pytest.raises(TooLarge, match="the limit is"):
        list(decoder.feed(codec.encode_block({"block": 1}, LIMITS.payload_bytes + 1)))


def test_what_is_remembered_of_headers_is_bounded():
    decoder = Decoder(LIMITS, endless=True, prepare=dict)
    for number in range(codec.KNOWN_HEADERS + 10):
        list(decoder.feed(codec.encode_block({"block": number}, 0)))
    list(decoder.feed(codec.encode_block({"name": "x" * codec.KNOWN_BYTES}, 0)))
    assert len(decoder.known) == 10
    assert len(decoder.lengths) <= 2

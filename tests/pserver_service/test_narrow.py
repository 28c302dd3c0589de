"""Payloads in bfloat16 and float16 at a parameter server: exact sizes, one cast for all readers, full
precision inside."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio
import torch

from tests.pserver_service.jobs import (
    PLAIN,
    async_header,
    initialised,
    layout_of,
    payload_of,
    pull_request,
    pulled,
    push_header,
    stream,
)
from tests.pserver_service.jobs import check_invariants as check_without_casts
from tests.shared.serving.data_plane.servers import SIZES, TRANSPORTS
from tests.shared.serving.data_plane.servers import server as whole
from tests.shared.serving.data_plane.streams import growth
from trireme_shared.blocks.buffers import BufferPool
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.layout import Segment
from trireme_shared.protocol.wire import codec
from trireme_shared.protocol.wire.messages import PushBlock

__all__ = ["whole"]
MIXED = layout_of(
    40,
    Segment(kind="buffer", dtype="float32", elements=8),
    Segment(kind="buffer", dtype="int64", elements=8),
    optimizer=PLAIN,
)  # blocks: parameters of 16, 16 and 8, a float32 buffer (3), an int64 buffer (4)
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "int64": torch.int64}
FINE = 1 + 2**-10  # float16 keeps it, bfloat16 does not


def check_invariants(pserver) -> None:
    """A cast is held by its values and by nobody else."""
    for state in pserver.store.blocks.values():
        for buffer in filter(None, (state.current, state.previous)):
            assert buffer.cast is None or buffer.cast.references == 1
            buffer.forget_narrowed()
    check_without_casts(pserver)


@pytest_asyncio.fixture
async def server(whole):
    yield whole
    async with asyncio.timeout(5):
        while whole.pserver.pulls:
            await asyncio.sleep(0.01)
    check_invariants(whole.pserver)


def cast(dtype: str, value: float = 1.0, elements: int = 16) -> bytes:
    return payload_of(torch.full((elements,), value, dtype=TORCH[dtype]))


def block(number: int, dtype: str | None, lanes: tuple[int, int] = (0, 4), count: int = 8) -> PushBlock:
    return PushBlock(block=number, lanes=lanes, count=count, dtype=dtype)


async def push(pserver, *items, step: int = 0):
    answer = await pserver.push(push_header(step), stream(*items))
    return answer.applied, [(refusal.code, refusal.message) for refusal in answer.refused]


@pytest.mark.parametrize("whole", TRANSPORTS, indirect=True)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_gradients_and_parameters_travel_cast_over_every_transport(server, dtype):
    values = await server.initialise()
    gradients = {number: torch.randn(size).to(TORCH[dtype]) for number, size in SIZES.items()}
    items = (
        (block(k, dtype, count=4), memoryview(bytearray(payload_of(value)))) for k, value in gradients.items()
    )
    answer = await server.client.push(push_header(0), stream(*items))
    assert (answer.applied, answer.refused) == (len(SIZES), ())
    found = {number: torch.empty(size, dtype=TORCH[dtype]) for number, size in SIZES.items()}
    seen = []

    def sink(item):
        seen.append((item.block, item.dtype))
        return memoryview(found[item.block].view(torch.uint8).numpy())

    end = await server.client.pull(pull_request(1, SIZES, wait_s=5, dtype=dtype), sink)
    assert (end.code, sorted(seen)) == ("OK", [(number, dtype) for number in SIZES])
    for number, value in found.items():
        assert torch.equal(value, (values[number] - gradients[number].float()).to(TORCH[dtype]))
    counters = server.pserver.counters
    assert counters.bytes_pushed == counters.bytes_pulled == 2 * sum(SIZES.values())


async def test_any_msgpack_library_reads_and_writes_cast_blocks(server):
    values = await server.initialise()
    header = {"lanes": [0, 4], "count": 4, "dtype": "bfloat16"}
    parts = [({"block": number, **header}, cast("bfloat16", 2.0, size)) for number, size in SIZES.items()]
    async with server.any_client() as client:
        [end] = await client.answer("push", codec.plain(push_header(0)), *parts)
        assert end["message"]["applied"] == len(SIZES)
        *blocks, end = await client.answer("pull", codec.plain(pull_request(1, SIZES, dtype="float16")))
    assert (len(blocks), end["message"]["code"]) == (len(SIZES), "OK")
    for header, payload in blocks:
        assert header["dtype"] == "float16"
        expected = (values[header["block"]] - 2.0).half()
        assert torch.equal(torch.frombuffer(bytearray(payload), dtype=torch.float16), expected)


@pytest.mark.parametrize(
    ("number", "dtype", "payload", "why"),
    [
        (
            0,
            "bfloat16",
            cast("float32"),
            "64 bytes of bfloat16: expected 16 elements of float32 or, cast, bfloat16 or float16",
        ),
        (
            0,
            None,
            cast("bfloat16"),
            "32 bytes of float32: expected 16 elements of float32 or, cast, bfloat16 or float16",
        ),
        (0, "float16", cast("float16", elements=15), "30 bytes of float16: expected 16 elements of float32"),
        (0, "float16", b"", "0 bytes of float16: expected 16 elements of float32"),
        (3, "bfloat16", cast("bfloat16", elements=8), "16 bytes of bfloat16: expected 8 elements of float32"),
        (4, "bfloat16", cast("bfloat16", elements=8), "16 bytes of bfloat16: expected 8 elements of int64"),
        (4, "float16", cast("int64", 1, 8), "64 bytes of float16: expected 8 elements of int64"),
    ],
)
async def test_a_payload_that_is_not_the_block_in_its_dtype_is_refused_with_both(number, dtype, payload, why):
    pserver, values = await initialised(MIXED)
    applied, ((code, message),) = await push(pserver, (block(number, dtype), payload))
    assert (applied, code) == (0, "LAYOUT_MISMATCH")
    assert message.startswith(why)
    found, _ = await pulled(pserver, pull_request(0, (0,)))
    assert torch.equal(found[0], values[0])
    check_invariants(pserver)


@pytest.mark.parametrize("dtype", ["float64", "int64", "", 7, ["bfloat16"]])
async def test_an_unknown_dtype_is_a_bad_frame_and_changes_nothing(server, dtype):
    await server.initialise()
    header = {"block": 0, "lanes": [0, 4], "count": 4, "dtype": dtype}
    async with server.any_client() as client:
        [end] = await client.answer(
            "push", codec.plain(push_header(0)), (header, cast("float32", 1.0, SIZES[0]))
        )
        assert end["error"]["code"] == "BAD_FRAME"
    async with server.any_client() as client:
        [end] = await client.answer("pull", codec.plain(pull_request(0, (0,))) | {"dtype": dtype})
        assert end["error"]["code"] == "BAD_FRAME"
    assert server.pserver.store.highest == 0


async def test_one_step_of_a_block_has_one_dtype():
    pserver, _ = await initialised(MIXED)
    assert await push(pserver, (block(0, "bfloat16", (0, 2)), cast("bfloat16"))) == (1, [])
    applied, ((code, message),) = await push(pserver, (block(0, None, (2, 4)), cast("float32")))
    assert (applied, code) == (0, "LAYOUT_MISMATCH")
    assert "one dtype in a step" in message
    assert await push(pserver, (block(0, "bfloat16", (2, 4)), cast("bfloat16"))) == (1, [])
    # another step, another dtype
    assert await push(pserver, (block(0, None), cast("float32")), step=1) == (1, [])
    check_invariants(pserver)


async def test_nodes_that_meet_at_the_server_are_rounded_like_those_that_met_at_a_trainer():
    """(1 + 1.0078125) / 2 lies between two values of bfloat16."""
    pserver, values = await initialised(MIXED)
    above = 1 + 2**-7
    await push(pserver, (block(0, "bfloat16", (0, 2)), cast("bfloat16", 1.0)))
    await push(pserver, (block(0, "bfloat16", (2, 4)), cast("bfloat16", above)))
    mean = torch.tensor((1 + above) / 2).bfloat16().float()
    assert mean != (1 + above) / 2
    found, _ = await pulled(pserver, pull_request(1, (0,)))
    assert torch.equal(found[0], values[0] - mean)


async def test_what_is_inside_and_what_others_pull_stays_in_full_precision():
    pserver, values = await initialised(MIXED)
    await push(pserver, (block(0, None), cast("float32", FINE)))
    cast_values, full = [], []
    for dtype, into in (("bfloat16", cast_values), (None, full)):
        async for part in pserver.pull(pull_request(1, (0,), dtype=dtype)):
            if isinstance(part, tuple):
                into.append(bytes(part[1]))
    exact = values[0] - FINE
    assert full == [payload_of(exact)]
    assert cast_values == [payload_of(exact.bfloat16())]
    assert torch.equal(pserver.store.blocks[0].current.tensor, exact)
    check_invariants(pserver)


async def test_buffers_and_integers_are_pulled_as_they_are():
    pserver, values = await initialised(MIXED)
    found = {}
    async for part in pserver.pull(pull_request(0, range(5), dtype="float16")):
        if isinstance(part, tuple):
            found[part[0].block] = part[0].dtype, bytes(part[1])
    assert found == {
        **{number: ("float16", payload_of(values[number].half())) for number in (0, 1, 2)},
        **{number: (None, payload_of(values[number])) for number in (3, 4)},
    }


async def test_a_version_is_cast_once_for_all_readers(monkeypatch):
    casts = []
    pserver, _ = await initialised(MIXED)
    real = torch.Tensor.copy_

    def counting(into, values, *rest):
        casts.append(into.dtype)
        return real(into, values, *rest)

    monkeypatch.setattr(torch.Tensor, "copy_", counting)
    for _ in range(3):
        async for _ in pserver.pull(pull_request(0, (0, 1, 2), dtype="bfloat16")):
            pass
    assert casts == [torch.bfloat16] * 3
    monkeypatch.undo()
    check_invariants(pserver)


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.ASYNC])
async def test_a_reader_keeps_what_it_was_given_and_the_next_one_gets_what_is_new(mode):
    pserver, values = await initialised(MIXED, mode)
    old, new = (
        pull_request(version, (0,), dtype="bfloat16")
        for version in ((0, 1) if mode is Mode.SYNC else (None, None))
    )
    slow = pserver.pull(old)
    _, memory = await anext(slow)
    header = push_header(0) if mode is Mode.SYNC else async_header(0, 0, 1, 1)
    answer = await pserver.push(
        header, stream((block(0, None, (0, 4) if mode is Mode.SYNC else (0, 1)), cast("float32")))
    )
    assert answer.applied == 1
    assert bytes(memory) == payload_of(values[0].bfloat16())
    async for part in pserver.pull(new):
        if isinstance(part, tuple):
            assert bytes(part[1]) == payload_of((values[0] - 1).bfloat16())
    await slow.aclose()
    check_invariants(pserver)


async def test_an_update_in_place_is_seen_by_the_next_cast():
    pserver, values = await initialised(MIXED, Mode.ASYNC)
    for task in range(2):
        await pserver.push(
            async_header(task, 0, 1, 1), stream((block(0, "float16", (0, 1)), cast("float16")))
        )
        found = [part async for part in _payloads(pserver, "float16")]
        assert found == [payload_of((values[0] - 1 - task).half())]
    check_invariants(pserver)


async def _payloads(pserver, dtype):
    async for part in pserver.pull(pull_request(None, (0,), dtype=dtype)):
        if isinstance(part, tuple):
            yield bytes(part[1])


@pytest.mark.parametrize("whole", TRANSPORTS, indirect=True)
async def test_parameters_beyond_float16_end_the_pull_with_the_value(server):
    await server.initialise()
    server.pserver.store.blocks[1].current.tensor[5] = -70000.0
    found = {number: torch.empty(size, dtype=torch.float16) for number, size in SIZES.items()}
    end = await server.client.pull(
        pull_request(0, SIZES, dtype="float16"),
        lambda item: memoryview(found[item.block].view(torch.uint8).numpy()),
    )
    assert (end.code, end.message) == (
        "OVERFLOW",
        "a parameter in block 1: 70000 does not fit float16, which ends at 65504",
    )


async def test_memory_does_not_grow_with_steps():
    pserver, _ = await initialised(MIXED)
    sizes = []
    for step in range(12):
        for lanes in ((0, 1), (2, 4), (1, 2)):
            await push(
                pserver,
                *((block(n, "bfloat16", lanes), cast("bfloat16", 1.0, 16)) for n in (0, 1)),
                step=step,
            )
        async for _ in pserver.pull(pull_request(step + 1, (0, 1), dtype="float16")):
            pass
        sizes.append(pserver.store.pool.allocated_bytes)
    assert set(sizes[2:]) == {sizes[2]}
    check_invariants(pserver)


@pytest.mark.parametrize("whole", ["unix"], indirect=True)
async def test_steady_steps_over_a_stream_allocate_nothing_that_stays(server):
    await server.initialise()
    sent = {k: memoryview(bytearray(cast("bfloat16", 1.0, size))) for k, size in SIZES.items()}
    landing = memoryview(bytearray(2 * max(SIZES.values())))

    async def steps(first, last):
        for step in range(first, last):
            items = ((block(k, "bfloat16", count=4), payload) for k, payload in sent.items())
            await server.client.push(push_header(step), stream(*items))
            request = pull_request(step + 1, SIZES, wait_s=5, dtype="bfloat16")
            await server.client.pull(request, lambda item: landing[: 2 * SIZES[item.block]])

    pool, traced = await growth(server, steps, 8, 12, 32)
    assert pool == 0
    assert traced < 50_000, "a block is 131,072 bytes"


def test_a_cast_goes_back_with_its_values():
    pool = BufferPool()
    values = pool.take("float32", 16)
    values.tensor.fill_(FINE)
    first = values.narrowed("bfloat16")
    # another dtype replaces it; whoever has the first keeps it
    assert values.narrowed("float16") is not first
    assert first.references == 1
    first.release()
    values.cast.release()
    values.release()
    assert pool.free_bytes == pool.allocated_bytes == 64 + 32 + 32

"""Pulls of a trainer that says what it has: buffers that are still the same come without their values, bit
for bit as if they had come."""

from __future__ import annotations

import random
from contextlib import aclosing

import pytest
import torch

from tests.equipment.replaced import replaced
from tests.pserver_service.jobs import (
    PLAIN,
    async_header,
    check_invariants,
    init_header,
    initialised,
    item,
    layout_of,
    payload_of,
    pull_request,
    push_header,
    stream,
    values_of,
)
from trireme_shared.blocks.buffers import bytes_of
from trireme_shared.protocol.errors import BadFrame
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.layout import Layout, Segment
from trireme_shared.protocol.wire import codec
from trireme_shared.protocol.wire.messages import InitBlock, PullEnd, PullRequest, PushBlock
from trireme_shared.serving.core import calls
from trireme_shared.serving.core.stores import store_of

LAYOUT: Layout = layout_of(
    16,
    Segment(kind="buffer", dtype="float32", elements=32),
    Segment(kind="buffer", dtype="int64", elements=8),
    optimizer=PLAIN,
)
PARAMETER, TABLE, MEAN, COUNTER = range(4)
BLOCKS = range(4)
ZEROS = torch.zeros(16)


class Puller:
    """A trainer's two vectors and what it says about the one in use. `came`: the blocks of the last pull
    whose values came."""

    def __init__(self):
        self.current, self.staging, self.known, self.named, self.came = {}, {}, "", "", []

    async def pull(self, pserver, version, **fields):
        request = pull_request(version, BLOCKS, **({"known": self.known} | fields))
        self.came, self.named = [], ""
        async with aclosing(pserver.pull(request)) as answer:
            async for part in answer:
                if isinstance(part, PullEnd):
                    self.named = part.known
                    return part
                block, payload = part
                if block.same:
                    assert not payload
                    self.staging[block.block] = self.current[block.block]
                else:
                    self.came.append(block.block)
                    self.staging[block.block] = bytes(payload)
        raise AssertionError("no end")

    def swap(self):
        self.current, self.staging, self.known = dict(self.staging), self.current, self.named or ""

    async def step(self, pserver, version):
        assert (await self.pull(pserver, version)).code == "OK"
        self.swap()
        return self.came


async def whole(pserver, version):
    """The values as who knows nothing gets them."""
    puller = Puller()
    assert (await puller.pull(pserver, version, known=None)).known is None
    assert sorted(puller.came) == list(BLOCKS)
    return puller.staging


def left_alone(block, lanes=(0, 4)):
    return PushBlock(block=block, lanes=lanes, count=8), b""


def step_of(step, *changed, **fields):
    """`changed`: (block, its values)."""
    items = {number: left_alone(number) for number in (TABLE, MEAN, COUNTER)} | {
        PARAMETER: item(PARAMETER, ZEROS + 1)
    }
    return push_header(step, **fields), stream(
        *(items | {block: item(block, values) for block, values in changed}).values()
    )


async def test_only_buffers_that_changed_come_again():
    pserver, _ = await initialised(LAYOUT)
    puller = Puller()
    assert sorted(await puller.step(pserver, 0)) == list(BLOCKS)
    pulled = pserver.counters.bytes_pulled
    await pserver.push(*step_of(0, (MEAN, ZEROS)))
    assert sorted(await puller.step(pserver, 1)) == [PARAMETER, MEAN]
    assert pserver.counters.bytes_pulled - pulled == 2 * 64
    await pserver.push(*step_of(1))
    assert await puller.step(pserver, 2) == [PARAMETER]
    assert puller.current == await whole(pserver, 2)
    check_invariants(pserver)


async def test_a_buffer_that_is_pushed_with_the_bits_it_has_is_unchanged():
    pserver, values = await initialised(LAYOUT)
    puller = Puller()
    await puller.step(pserver, 0)
    await pserver.push(*step_of(0, (TABLE, values[TABLE]), (COUNTER, values[COUNTER])))
    assert await puller.step(pserver, 1) == [PARAMETER]
    await pserver.push(*step_of(1, (TABLE, ZEROS)))
    assert sorted(await puller.step(pserver, 2)) == [PARAMETER, TABLE]
    await pserver.push(*step_of(2, (TABLE, -ZEROS)))
    assert sorted(await puller.step(pserver, 3)) == [PARAMETER, TABLE], "-0.0 is not 0.0"
    assert puller.current == await whole(pserver, 3)
    check_invariants(pserver)


async def test_who_says_nothing_gets_everything_and_hears_nothing_new():
    pserver, _ = await initialised(LAYOUT)
    for step in range(3):
        await pserver.push(*step_of(step))
        await whole(pserver, step + 1)


@pytest.mark.parametrize(
    "known", ["", "@0", "ps-1/1@", "ps-1/1@x", "ps-1/1@²", "ps-1/1@-1", "ps-1/2@0", "ps-2/1@0"]
)
async def test_a_name_that_this_pserver_did_not_give_names_nothing(known):
    pserver, _ = await initialised(LAYOUT)
    puller = Puller()
    end = await puller.pull(pserver, 0, known=known)
    assert sorted(puller.came) == list(BLOCKS)
    assert end.known == "ps-1/1@0"


def test_a_name_of_any_length_is_no_request():
    with pytest.raises(BadFrame, match="known"):
        codec.read(PullRequest, codec.plain(pull_request(0, BLOCKS)) | {"known": "7" * 301})


async def test_who_lags_or_is_ahead_gets_the_bits_of_the_version_it_asks_for():
    pserver, _ = await initialised(LAYOUT)
    slow, fast = Puller(), Puller()
    await slow.step(pserver, 0)
    await pserver.push(*step_of(0, (MEAN, ZEROS + 1)))
    await pserver.push(*step_of(1, (MEAN, ZEROS + 2)))
    await fast.step(pserver, 2)
    assert sorted(await fast.step(pserver, 1)) == list(BLOCKS), "it has a newer version than it asks for"
    assert fast.current == await whole(pserver, 1)
    assert sorted(await slow.step(pserver, 1)) == [PARAMETER, MEAN]
    assert slow.current == await whole(pserver, 1)
    assert sorted(await slow.step(pserver, 2)) == [PARAMETER, MEAN]
    assert slow.current == await whole(pserver, 2)


async def test_values_that_come_back_after_a_change_come_again():
    """0 -> 1 -> 0 in three versions: the name says a version, and what it had then is no longer known to be
    the same."""
    pserver, values = await initialised(LAYOUT)
    puller = Puller()
    await puller.step(pserver, 0)
    await pserver.push(*step_of(0, (TABLE, ZEROS + 1)))
    await pserver.push(*step_of(1, (TABLE, values[TABLE])))
    assert sorted(await puller.step(pserver, 2)) == [PARAMETER, TABLE]
    assert puller.current == await whole(pserver, 2)


async def test_a_version_without_data_changes_nothing():
    pserver, _ = await initialised(LAYOUT)
    puller = Puller()
    await puller.step(pserver, 0)
    empty = stream(*((PushBlock(block=number, lanes=(0, 4), count=0), b"") for number in BLOCKS))
    await pserver.push(push_header(0), empty)
    assert await puller.step(pserver, 1) == []
    assert puller.current == await whole(pserver, 1)


async def another_store(mode=Mode.SYNC, seed=1):
    """A store of the same layout with other values."""
    store = store_of(init_header(LAYOUT, mode))
    for number, values in values_of(LAYOUT, seed).items():
        store.add_block(number, bytes_of(values))
    store.seal()
    return store


async def after_a_restore(mode, version):
    """(blocks that came, bits that the puller has, bits that it should have) after the pserver loaded other
    values."""
    pserver, _ = await initialised(LAYOUT, mode)
    puller = Puller()
    await puller.step(pserver, version)
    pserver.restore(await another_store(mode), 1, "checkpoint")
    came = await puller.step(pserver, version)
    return sorted(came), puller.current, await whole(pserver, version)


@pytest.mark.parametrize(("mode", "version"), [(Mode.SYNC, 0), (Mode.ASYNC, None)])
async def test_after_a_rollback_everything_comes(mode, version):
    came, has, should = await after_a_restore(mode, version)
    assert (came, has) == (list(BLOCKS), should)


@pytest.mark.parametrize(("mode", "version"), [(Mode.SYNC, 0), (Mode.ASYNC, None)])
async def test_without_the_name_of_the_store_a_rollback_would_leave_old_values(mode, version):
    with replaced(calls, "moment_of", lambda _, known: int(known.rpartition("@")[2]) if known else None):
        came, has, should = await after_a_restore(mode, version)
    assert came != list(BLOCKS)
    assert has != should


async def test_another_process_knows_nothing_of_the_names_of_the_one_before():
    pserver, _ = await initialised(LAYOUT)
    puller = Puller()
    await puller.step(pserver, 0)
    after, _ = await initialised(LAYOUT)
    after.incarnation = "ps-2"
    after.drop(1)
    await after.init(
        init_header(LAYOUT, generation=1),
        stream(*((InitBlock(block=n), payload_of(values)) for n, values in values_of(LAYOUT, 1).items())),
    )
    assert sorted(await puller.step(after, 0)) == list(BLOCKS)
    assert puller.current == await whole(after, 0)


async def test_asynchronous_buffers_come_when_they_changed():
    pserver, values = await initialised(LAYOUT, Mode.ASYNC)
    puller = Puller()
    await puller.step(pserver, None)

    async def push(start, *changed):
        items = {n: (PushBlock(block=n, count=8), b"") for n in (TABLE, MEAN, COUNTER)}
        items |= {PARAMETER: item(PARAMETER, ZEROS + 1, (0, 1))} | {n: item(n, v, (0, 1)) for n, v in changed}
        await pserver.push(async_header(0, start, start + 1, 9), stream(*items.values()))

    await push(0)
    assert await puller.step(pserver, None) == [PARAMETER]
    await push(1, (MEAN, ZEROS), (COUNTER, torch.ones(8, dtype=torch.int64)))
    assert sorted(await puller.step(pserver, None)) == [PARAMETER, MEAN, COUNTER]
    await push(2, (MEAN, ZEROS), (COUNTER, torch.zeros(8, dtype=torch.int64)), (TABLE, values[TABLE]))
    assert await puller.step(pserver, None) == [PARAMETER]
    assert puller.current == await whole(pserver, None)
    check_invariants(pserver)


async def test_a_buffer_that_changes_while_an_asynchronous_pull_is_under_way_comes_again():
    pserver, _ = await initialised(LAYOUT, Mode.ASYNC)
    puller = Puller()
    await puller.step(pserver, None)
    async with aclosing(pserver.pull(pull_request(None, BLOCKS, known=puller.known))) as answer:
        named, _ = await anext(answer), await anext(answer)
        assert named[0].block == PARAMETER
        await pserver.push(async_header(0, 0, 1, 9), stream(item(TABLE, ZEROS, (0, 1))))
        known = [part async for part in answer][-1].known
    puller.known = known  # the table had come before it changed
    assert TABLE in await puller.step(pserver, None)
    assert puller.current == await whole(pserver, None)


def naive(self, number, _, moment):
    """As if only the newest change counted, whatever version is asked for."""
    return moment is not None and self.blocks[number].is_buffer and self.blocks[number].changed <= moment


async def random_job(seed):
    """Whether two pullers always had the bits of the version that they asked for."""
    rng = random.Random(seed)
    pserver, values = await initialised(LAYOUT)
    pullers, right = [Puller(), Puller()], True
    for step in range(30):
        changed = [
            (n, torch.full((16,), float(rng.randrange(2)))) for n in (TABLE, MEAN) if rng.random() < 0.4
        ]
        if rng.random() < 0.3:
            changed.append((COUNTER, values[COUNTER] + rng.randrange(2)))
        await pserver.push(*step_of(step, *changed))
        for puller in rng.choices(pullers, k=3):
            version = step + 1 - rng.randrange(2)
            await puller.pull(pserver, version)
            right = right and puller.staging == await whole(pserver, version)
            if rng.random() < 0.8:  # else the step is given up before the vectors are swapped
                puller.swap()
    check_invariants(pserver)
    return right


async def test_any_order_of_steps_and_pulls_has_the_bits_of_the_versions():
    assert all([await random_job(seed) for seed in range(40)])


async def test_a_rule_that_forgets_the_version_asked_for_has_others():
    with replaced(calls, "is_same", naive):
        assert not all([await random_job(seed) for seed in range(40)])

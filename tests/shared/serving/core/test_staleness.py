"""Asynchronous: a push steps with the learning rate divided by the versions since its parameters were pulled,
and still once."""

from __future__ import annotations

import asyncio
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from tests.equipment.cluster.lookups import lookup
from tests.equipment.replaced import replaced
from tests.pserver_service.checkpoints import parts
from tests.pserver_service.jobs import (
    LAYOUT,
    async_header,
    check_invariants,
    init_header,
    initialised,
    item,
    layout_of,
    payload_of,
    pull_request,
    pulled,
    stream,
)
from tests.shared.serving.core.test_moving import empty, hand_over
from tests.shared.serving.table.tables import LAYOUT as TABLES
from tests.shared.serving.table.tables import NONE, ids, pushed_rows, values_in, wanted
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.layout import OptimizerSpec, Segment
from trireme_shared.protocol.records.step import LaneZero
from trireme_shared.protocol.wire.messages import PushBlock
from trireme_shared.serving.block_server import BlockServer
from trireme_shared.serving.core import asynchronous
from trireme_shared.serving.core.calls import OpenPush
from trireme_shared.serving.core.moving import LeavingBlocks
from trireme_shared.serving.core.optimizers import BlockOptimizer
from trireme_shared.serving.core.stores import store_of
from trireme_shared.serving.data_plane.lookups import found_end
from trireme_shared.serving.optimizers.classes import CLASSES
from trireme_shared.serving.pserver import Pserver

OPTIONS = {"SGD": {"momentum": 0.9, "weight_decay": 0.01}, "AdamW": {"weight_decay": 0.1}}
SIZES = {0: 16, 1: 16, 2: 8}


async def push(
    pserver: Pserver, task: int, start: int, versions: dict[int, int], lr: float = 1.0, value: float = 1.0
):
    """Minibatch `start` of 4, computed from blocks of these versions."""
    lane_zero = LaneZero(options=({"lr": lr},))
    items = []
    for block, version in versions.items():
        gradient = torch.full((SIZES[block],), value)
        head = PushBlock(block=block, lanes=(0, 1), count=8, version=version)
        items.append((head, payload_of(gradient)))
    return await pserver.push(async_header(task, start, start + 1, 4, lane_zero=lane_zero), stream(*items))


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_optimizer_steps_with_its_rate_divided(name: str) -> None:
    layout = layout_of(
        16, optimizer=OptimizerSpec(name=name, defaults={"lr": 0.5, **OPTIONS.get(name, {})}, groups=({},))
    )
    ahead = [0, 0, 1, 3, 0]  # versions that the block is ahead of what each push was computed from

    async def main() -> torch.Tensor:
        pserver, values = await initialised(layout, Mode.ASYNC)
        alone = torch.nn.Parameter(values[0].clone())
        optimizer = CLASSES[name]([alone], lr=0.5, **OPTIONS.get(name, {}))
        for version, behind in enumerate(ahead):
            gradient = torch.linspace(-1, 1, 16) * (version + 1)
            head = PushBlock(block=0, lanes=(0, 1), count=8, version=version - behind)
            header = async_header(0, version, version + 1, 9, lane_zero=LaneZero(options=({"lr": 0.5},)))
            assert (await pserver.push(header, stream((head, payload_of(gradient))))).applied == 1
            alone.grad = gradient.clone()
            optimizer.param_groups[0]["lr"] = 0.5 / max(1, behind)
            optimizer.step()
        check_invariants(pserver)
        found, _ = await pulled(pserver, pull_request(None, (0,)))
        assert torch.equal(found[0], alone.detach())
        return found[0]

    asyncio.run(main())


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_no_optimizer_computes_values_from_sums_that_another_rate_would_stretch(name: str) -> None:
    """Its change of the values is proportional to the rate of the step, so a late push is only a smaller
    one."""
    changes = []
    for rate in (0.5, 0.5 / 16):
        rng = torch.Generator().manual_seed(5)
        values = torch.randn(16, generator=rng)
        optimizer = BlockOptimizer(name, {"lr": 0.5, **OPTIONS.get(name, {})}, values)
        for _ in range(8):
            optimizer.step(values, torch.randn(16, generator=rng), {"lr": 0.5})
        before = values.clone()
        optimizer.step(values, torch.randn(16, generator=rng), {"lr": rate})
        changes.append(values - before)
    assert changes[0].abs().max() > 0
    torch.testing.assert_close(changes[1], changes[0] / 16, rtol=1e-3, atol=2e-6)


def test_groups_without_a_rate_in_the_push_have_that_of_their_optimizer() -> None:
    assert asynchronous.slowed({}, {"lr": 0.5}, 4) == {"lr": 0.125}
    assert asynchronous.slowed({"lr": 2.0}, {"lr": 0.5}, -3) == {"lr": 2.0}
    assert asynchronous.slowed({"momentum": 0.9}, None, 4) == {"momentum": 0.9}


@pytest.mark.parametrize(
    ("broken", "holds"),
    [
        (lambda: nullcontext(), True),
        (lambda: replaced(asynchronous, "divisor", lambda _: 1), False),
    ],
    ids=["as it is", "without the division"],
)
@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_pushes_pulls_repetitions_and_moves_gives_the_sum_of_divided_steps(
    seed: int, broken, holds
) -> None:
    """Against a model of eight lines: 3 trainers, pushes that come twice, and blocks that move to another
    parameter server."""
    rng = random.Random(seed)

    async def main() -> bool:
        source, values = await initialised(LAYOUT, Mode.ASYNC)
        target = empty(Mode.ASYNC, LAYOUT)
        owners = dict.fromkeys(SIZES, source)
        expected = {block: float(values[block][0]) for block in SIZES}
        applied = dict.fromkeys(SIZES, 0)
        held = [dict.fromkeys(SIZES, 0) for _ in range(3)]  # by trainer, the versions that it has
        due = [
            [(task, start) for task in (trainer, trainer + 3) for start in range(4)] for trainer in range(3)
        ]
        for number in range(24):
            if number == 9:
                leaving = LeavingBlocks(source.store, (1, 2))
                leaving.begin()
                leaving.freeze_idle()
                hand_over(source, target, leaving)
                owners |= {1: target, 2: target}
            trainer = rng.choice([each for each in range(3) if due[each]])
            task, start = due[trainer].pop(0)
            for repetition in range(rng.choice([1, 1, 2])):
                for block, owner in owners.items():
                    version = held[trainer][block] if not repetition else rng.randrange(30)
                    answer = await push(owner, task, start, {block: version})
                    assert (answer.applied, answer.duplicate) == ((0, 1) if repetition else (1, 0))
                    if not repetition:
                        expected[block] -= 1.0 / max(1, applied[block] - version)
                        applied[block] += 1
            if rng.random() < 0.6:
                for owner in (source, target):
                    _, end = await pulled(owner, pull_request(None, owner.store.blocks, versions=True))
                    held[trainer] |= dict(end.versions)
        found = {}
        for owner in (source, target):
            found |= (await pulled(owner, pull_request(None, owner.store.blocks)))[0]
            check_invariants(owner)
        assert {block: owners[block].store.blocks[block].version for block in SIZES} == dict.fromkeys(
            SIZES, 24
        )
        return all(abs(float(found[block][0]) - expected[block]) < 1e-4 for block in SIZES)

    with broken():
        assert asyncio.run(main()) is holds


def test_a_push_of_a_narrow_dtype_is_divided_too() -> None:
    async def main() -> None:
        pserver, values = await initialised(LAYOUT, Mode.ASYNC)
        for start in range(4):
            head = PushBlock(block=0, lanes=(0, 1), count=8, dtype="bfloat16", version=0)
            gradient = torch.ones(16, dtype=torch.bfloat16)
            await pserver.push(async_header(0, start, start + 1, 4), stream((head, payload_of(gradient))))
        found, _ = await pulled(pserver, pull_request(None, (0,)))
        assert torch.allclose(found[0], values[0] - (1 + 1 + 1 / 2 + 1 / 3))

    asyncio.run(main())


def test_a_buffer_has_no_rate() -> None:
    buffer = Segment(kind="buffer", dtype="float32", elements=8)

    async def main() -> None:
        pserver, _ = await initialised(layout_of(buffer), Mode.ASYNC)
        for start in range(3):
            head = PushBlock(block=0, lanes=(0, 1), count=8, version=0)
            await pserver.push(
                async_header(0, start, start + 1, 4),
                stream((head, payload_of(torch.full((8,), 3.0 + start)))),
            )
        found, _ = await pulled(pserver, pull_request(None, (0,)))
        assert found[0].tolist() == [5.0] * 8

    asyncio.run(main())


def test_versions_of_before_a_return_count_only_as_far_as_the_return() -> None:
    store = store_of(init_header(LAYOUT, Mode.ASYNC, record=parts.StepRecord(version=500, positions=())))
    for number, size in SIZES.items():
        store.add_block(number, memoryview(payload_of(torch.zeros(size))))
    store.seal()
    pserver = Pserver("ctr", "ps-1", index=0)
    pserver.store = store

    async def main() -> None:
        for start, version in enumerate((40, 600, 40, 40)):
            await push(pserver, 0, start, {0: version})
        found, _ = await pulled(pserver, pull_request(None, (0,)))
        assert found[0][0].item() == pytest.approx(-(1 + 1 + 1 / 2 + 1 / 3))

    asyncio.run(main())


def test_a_pull_tells_versions_only_if_it_is_asked() -> None:
    async def main() -> None:
        pserver, _ = await initialised(LAYOUT, Mode.ASYNC)
        await push(pserver, 0, 0, {1: 0})
        _, end = await pulled(pserver, pull_request(None, (0, 1)))
        assert end.versions == ()
        _, end = await pulled(pserver, pull_request(None, (1, 0), versions=True))
        assert end.versions == ((1, 1), (0, 0))

    asyncio.run(main())


def test_rows_step_with_their_rate_divided_and_a_lookup_tells_their_version() -> None:
    async def main() -> None:
        store = store_of(init_header(TABLES.model_copy(update={"segments": ()}), Mode.ASYNC, 1))
        store.seal()
        pserver = Pserver("ctr", "ps-1", index=0)
        pserver.store = store
        server = BlockServer("ctr", "ps-1")
        server.store, server.index = store, 0
        for start, version in enumerate((0, 0, 0, 0, 4, None)):
            for _ in range(2):  # the second time it is a duplicate
                pushing = OpenPush(server, store, async_header(0, start, start + 1, 8))
                head, payload = pushed_rows(0, ids(1), NONE)
                pushing.apply(head.model_copy(update={"version": version}), memoryview(bytearray(payload)))
                assert pushing.answer().refused == ()
        request, asked = wanted(None, ids(1), NONE)
        rows = await lookup(pserver, request, asked)
        assert found_end(pserver).version == 6
        assert np.allclose(values_in(rows, 1, 0)[0], 0.5 - (1 + 1 + 1 / 2 + 1 / 3 + 1 + 1))

    asyncio.run(main())


def test_a_push_without_versions_steps_with_the_whole_rate() -> None:
    async def main() -> None:
        pserver, values = await initialised(LAYOUT, Mode.ASYNC)
        for start in range(4):
            await pserver.push(
                async_header(0, start, start + 1, 4), stream(item(0, torch.ones(16), lanes=(0, 1)))
            )
        found, _ = await pulled(pserver, pull_request(None, (0,)))
        assert torch.allclose(found[0], values[0] - 4)

    asyncio.run(main())

"""max_staleness at a parameter server: who waits, for whom, and who is not waited for."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.equipment.replaced import replaced
from tests.pserver_service.jobs import (
    LAYOUT,
    async_header,
    check_invariants,
    initialised,
    item,
    pull_request,
    pulled,
    stream,
)
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.wire.messages import PullEnd, StalenessBound
from trireme_shared.serving.core.asynchronous import ParametersInUse
from trireme_shared.serving.pserver import Pserver

TASKS = {"fast": 0, "slow": 1, "third": 2}


class TimedPserver(Pserver):
    """It has a clock of its own; trainers named in `gone` are no members."""

    def __init__(self, *arguments, **fields) -> None:
        super().__init__(*arguments, **fields)
        self.seconds, self.gone = 100.0, set[str]()

    def now(self) -> float:
        return self.seconds

    def is_live(self, trainer: str) -> bool:
        return trainer not in self.gone


class Job:
    """What trainers do at a parameter server."""

    def __init__(self, pserver: TimedPserver) -> None:
        self.pserver, self.gone, self.next = pserver, pserver.gone, dict.fromkeys(TASKS, 0)

    async def pull(self, trainer: str, versions: int | None = 2, wait_s: float = 0.0) -> PullEnd:
        bound = StalenessBound(trainer=trainer, versions=versions, floor_s=10, ceiling_s=60)
        blocks = (0,) if versions is not None else ()
        return (await pulled(self.pserver, pull_request(None, blocks, wait_s=wait_s, bound=bound)))[1]

    async def push(self, trainer: str, *, keeps: bool = False) -> None:
        start = self.next[trainer]
        self.next[trainer] += 1
        header = async_header(TASKS[trainer], start, start + 1, 99, trainer=trainer, keeps=keeps)
        answer = await self.pserver.push(header, stream(item(0, torch.ones(16), lanes=(0, 1))))
        assert answer.applied == 1

    async def minibatches(self, trainer: str, count: int) -> None:
        for _ in range(count):
            assert (await self.pull(trainer)).code == "OK"
            await self.push(trainer)


async def job() -> Job:
    pserver, _ = await initialised(LAYOUT, Mode.ASYNC, kind=TimedPserver)
    return Job(pserver)


async def test_a_trainer_waits_until_the_slower_one_has_pushed():
    made = await job()
    await made.pull("slow")
    # it begins the third one when the slow one's parameters are 2 pushes old
    await made.minibatches("fast", 3)
    end = await made.pull("fast")
    assert (end.code, end.message) == (
        "TOO_EARLY",
        "slow computes with parameters 3 pushes old, and max_staleness is 2",
    )
    waiting = asyncio.create_task(made.pull("fast", wait_s=30.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    await made.push("slow")
    assert (await waiting).code == "OK"
    check_invariants(made.pserver)


async def test_without_the_bound_it_would_not_wait():
    made = await job()
    await made.pull("slow")
    with replaced(ParametersInUse, "slowest", lambda *_: None):
        await made.minibatches("fast", 10)


@pytest.mark.parametrize("how", ["dies", "lets go", "takes too long"])
async def test_who_computes_no_more_is_not_waited_for(how):
    made = await job()
    await made.pull("slow")
    await made.minibatches("fast", 3)
    assert (await made.pull("fast")).code == "TOO_EARLY"
    if how == "dies":
        made.gone.add("slow")
    elif how == "lets go":
        assert (await made.pull("slow", versions=None)).code == "OK"
    else:
        made.pserver.seconds += 9  # less than the floor
        assert (await made.pull("fast")).code == "TOO_EARLY"
        made.pserver.seconds += 52
    await made.minibatches("fast", 10)


async def test_a_trainer_that_lets_go_wakes_who_waits():
    made = await job()
    await made.pull("slow")
    await made.minibatches("fast", 3)
    waiting = asyncio.create_task(made.pull("fast", wait_s=30.0))
    await asyncio.sleep(0)
    await made.pull("slow", versions=None)
    assert (await waiting).code == "OK"


async def test_patience_follows_the_longest_push():
    made = await job()
    await made.pull("third")
    made.pserver.seconds += 8
    await made.push("third")  # 8 s: 16 are allowed from now on
    await made.pull("slow")
    await made.minibatches("fast", 3)
    made.pserver.seconds += 15
    assert (await made.pull("fast")).code == "TOO_EARLY"
    made.pserver.seconds += 2
    assert (await made.pull("fast")).code == "OK"


async def test_who_keeps_its_parameters_after_a_push_is_waited_for_and_its_pushes_are_signs_of_life():
    made = await job()
    await made.pull("slow")
    made.pserver.seconds += 50
    await made.push("slow", keeps=True)
    made.pserver.seconds += 50
    await made.minibatches("fast", 2)
    assert (await made.pull("fast")).code == "TOO_EARLY"
    await made.push("slow")
    assert (await made.pull("fast")).code == "OK"


async def test_who_waits_is_waited_for_by_nobody():
    made = await job()
    await made.pull("slow")
    await made.minibatches("fast", 3)
    waiting = [asyncio.create_task(made.pull(name, wait_s=30.0)) for name in ("fast", "third")]
    await asyncio.sleep(0)
    await made.push("slow")
    assert [(await each).code for each in waiting] == ["OK", "OK"]


async def test_a_bound_of_zero_lets_all_compute_with_one_version():
    made = await job()
    for name in TASKS:
        assert (await made.pull(name, versions=0)).code == "OK"
    await made.push("fast")
    assert (await made.pull("fast", versions=0)).code == "TOO_EARLY"
    await made.push("slow")
    await made.push("third")
    assert (await made.pull("fast", versions=0)).code == "OK"


async def test_strangers_are_not_remembered():
    made = await job()
    made.gone.add("slow")
    assert (await made.pull("slow")).code == "OK"
    await made.minibatches("fast", 10)

"""What copies and roll-backs cost: independent checkpoints are copied while pushes go on, and a roll-back
gives the memory of what is lost back before it loads."""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from typing import Any

import pytest

from pserver_service.checkpoints import independent
from pserver_service.context import PserverContext
from pserver_service.recovery import load_store
from tests.pserver_service.checkpoints import parts
from tests.pserver_service.checkpoints.async_job import opened, push_of
from tests.pserver_service.checkpoints.cluster import run_scenario
from tests.pserver_service.checkpoints.tables import TableCluster, expected_rows, rows_in
from trireme_shared.checkpoints.saving_context import GivenUp
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.wire.messages import PushBlock, Verdict
from trireme_shared.serving.core.stores import AsyncStore


def values_in(snapshot: Any) -> dict[str, bytes]:
    return {name: bytes(saved.buffer.view) for name, saved in snapshot.tensors.items()}


def copying(cluster: Any, number: int) -> asyncio.Task[Any]:
    """What parameter server 0 copies alone."""
    node = cluster.nodes[0]
    alone = independent.Independent(node.member.rollback.context)
    return asyncio.create_task(alone.copied(node.pserver.store, number))


def push_at_once(cluster: Any, start: int) -> None:
    """A minibatch to parameter server 0, all of it in one turn of the event loop."""
    store, gradients = cluster.stores[0], parts.gradient(cluster.layout, start, 3)
    admitted = store.admit(push_of(3, start, start + 1, generation=cluster.state.generation))
    for number in store.blocks:
        verdict = store.apply(admitted, PushBlock(block=number, count=1), parts.bytes_view(gradients[number]))
        assert verdict is Verdict.APPLIED


@pytest.mark.parametrize("guarded", [True, False])
def test_an_independent_copy_is_of_one_instant_though_pushes_come_between_its_turns(
    tmp_path, monkeypatch, guarded
):
    monkeypatch.setattr(independent, "COPY_BYTES", 1)
    if not guarded:
        monkeypatch.setattr(AsyncStore, "copy_before_changes", lambda *_: None)

    async def scenario():
        cluster = await opened(tmp_path, layout=parts.layout_of(elements=1500))
        store = cluster.stores[0]
        at_once = store.begin_copy(independent.StepRecord(version=1, positions=()))
        for number in store.blocks:
            store.copy_block(at_once, number)
        copied = copying(cluster, 2)
        turns = 0
        while not copied.done():
            await asyncio.sleep(0)
            turns += 1
            if turns == 5:
                assert not copied.done()
                push_at_once(cluster, 1)
        snapshot = copied.result()
        assert turns > 5, "the push copied what it changed"
        assert snapshot.ledger == at_once.ledger
        assert (values_in(snapshot) == values_in(at_once)) == guarded
        push_at_once(cluster, 2)  # nothing is copied any more
        assert (values_in(snapshot) == values_in(at_once)) == guarded

    run_scenario(scenario)


def test_an_independent_copy_is_given_up_with_the_parameters(tmp_path, monkeypatch):
    monkeypatch.setattr(independent, "COPY_BYTES", 1)

    async def scenario():
        cluster = await opened(tmp_path, layout=parts.layout_of(elements=1500))
        copied = copying(cluster, 2)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        cluster.nodes[0].pserver.drop(0)
        with pytest.raises(GivenUp, match="were dropped"):
            await copied

    run_scenario(scenario)


def test_a_roll_back_frees_the_parameters_before_it_loads(tmp_path):
    async def scenario():
        cluster = TableCluster(str(tmp_path))
        await cluster.open()
        await cluster.checkpointed(0, 4)
        await cluster.train(4, 5)
        await cluster.committed(5)
        there: list[bool] = []
        for node in cluster.nodes.values():
            node.member.rollback.context = watched(node, there)
        answers = await cluster.roll_back()
        assert [member.restored.error for member in answers] == ["", ""]
        assert there == [False] * 4, "the stores of both, and their rows, once each loads"
        assert rows_in(cluster.stores) == expected_rows(5)

    run_scenario(scenario)


def test_a_copy_that_is_being_written_lets_the_rows_of_a_job_that_goes_back_go(tmp_path):
    async def scenario():
        cluster = TableCluster(str(tmp_path))
        await cluster.open()
        await cluster.checkpointed(0, 4)
        pserver = cluster.nodes[0].pserver
        [reading, _] = pserver.store.rows.copies()
        group = next(reading.groups())
        pserver.drop(0)
        assert not reading.is_open
        with pytest.raises(InvalidArgument, match="the job goes back to a checkpoint"):
            reading.read(group)

    run_scenario(scenario)


def watched(node: Any, there: list[bool]) -> PserverContext:
    """Tells, when the node loads a checkpoint, whether its store, and the rows in it, are there still."""
    context, store = node.member.rollback.context, node.pserver.store
    before = [weakref.ref(each) for each in (store, store.rows)]

    async def offload(work: Any, *arguments: Any) -> Any:
        if work is load_store:
            there.extend(ref() is not None for ref in before)
        return await context.offload(work, *arguments)

    return dataclasses.replace(context, offload=offload)

"""Requests for a checkpoint while one is being made: each gets a checkpoint that was begun after the
request."""

from __future__ import annotations

import asyncio

import pytest

from master_service.core.decisions import pause_checkpoint
from master_service.core.decisions.operations import ASK_AGAIN_S
from master_service.leadership.master import Master
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.cluster import MasterCluster, leading, running, spec_of
from tests.master_service.control.restoring import commit, create, ended, names, request_of, spec
from trireme_shared.protocol.errors import Conflict
from trireme_shared.protocol.records import Mode, Phase
from trireme_shared.protocol.records.operations import CheckpointRequest, Operation, OperationState

DONE, FAILED = OperationState.DONE, OperationState.FAILED


async def requested(cluster: MasterCluster, operation: Operation) -> CheckpointRequest:
    """What the members are asked for, once it is for that operation."""
    async with asyncio.timeout(60):
        while (request := await request_of(cluster)) is None or request.operation != operation.operation_id:
            await asyncio.sleep(0.01)
    return request


def made(operation: Operation) -> tuple[OperationState, str]:
    return operation.state, operation.checkpoint_id


def test_a_request_while_a_checkpoint_is_being_made_gets_the_next_one_which_later_requests_share() -> None:
    """Its step may have been chosen already: it may be older than the request."""

    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as master:
            first, second = await create(master), await create(master, "k2")
            assert (
                second.reason
                == f"waiting for {first.operation_id} to end: its own checkpoint is the next one"
            )
            third, unkeyed = await create(master, "k3"), await create(master, "")
            assert unkeyed.operation_id == second.operation_id, "without a key: the first that is not begun"
            assert len({each.operation_id for each in (first, second, third)}) == 3
            assert (await requested(cluster, first)).attempt == 1
            await commit(cluster, 42, operation=first.operation_id)
            assert made(await ended(master, first)) == (DONE, "at-42")
            assert (await requested(cluster, second)).attempt == 1
            fourth = await create(master, "k4")
            await commit(cluster, 44, operation=second.operation_id)
            assert made(await ended(master, second)) == made(await ended(master, third)) == (DONE, "at-44")
            await requested(cluster, fourth)
            await commit(cluster, 46, operation=fourth.operation_id)
            assert made(await ended(master, fourth)) == (DONE, "at-46")
            assert await request_of(cluster) is None
            for key, known in {"k": first, "k2": second, "k3": third, "k4": fourth}.items():
                assert (await create(master, key)).operation_id == known.operation_id
            assert (names(master).count("checkpoint_asked"), names(master).count("operation_done")) == (3, 4)

    run_virtually(main)


def test_requests_that_wait_for_the_next_checkpoint_outlive_their_master_and_a_failed_one_before() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as first_master:
            first, second = (
                await create(first_master, limit_s=20.0),
                await create(first_master, "k2", limit_s=60.0),
            )
            third = await create(first_master, "k3")
            with pytest.raises(Conflict, match="at most 16 are taken"):
                for number in range(20):
                    await create(first_master, f"more-{number}", limit_s=20.0)
        async with leading(cluster.master("m2")) as master:
            assert (await ended(master, first)).error_code == "DEADLINE_EXCEEDED"
            assert (await requested(cluster, second)).attempt == 1
            assert (await ended(master, second)).error_code == "DEADLINE_EXCEEDED"
            assert (await requested(cluster, third)).attempt == 1, "its own limit is not over"
            await commit(cluster, 8, operation=third.operation_id)
            assert made(await ended(master, third)) == (DONE, "at-8")
            assert (await create(master, "k2")).operation_id == second.operation_id

    run_virtually(main)


def test_a_request_that_waited_is_asked_for_once_and_again_only_later() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as master:
            first, second = await create(master, limit_s=2 * ASK_AGAIN_S), await create(master, "k2")
            await ended(master, first)
            assert (await requested(cluster, second)).attempt == 1
            await asyncio.sleep(ASK_AGAIN_S / 2)
            assert (await requested(cluster, second)).attempt == 1
            await asyncio.sleep(ASK_AGAIN_S)
            assert (await requested(cluster, second)).attempt == 2

    run_virtually(main)


def test_the_last_checkpoint_answers_requests_that_wait_for_the_next_one() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as master:
            asked = [await create(master, key) for key in ("k1", "k2", "k3")]
            await commit(cluster, 99, operation=asked[0].operation_id, final=True)
            assert [made(await ended(master, each)) for each in asked] == [(DONE, "at-99")] * 3

    run_virtually(main)


def test_an_asynchronous_request_shares_the_next_pause_and_waits_for_another_once_that_has_begun() -> None:
    async def main() -> None:
        cluster = MasterCluster(
            spec_of(mode=Mode.ASYNC, checkpoint_kind="coordinated", checkpoint_every_seconds=None)
        )
        async with running(cluster, "t1") as master:
            await until(lambda: master.job.state.phase is Phase.CHECKPOINTING, "the first checkpoint")
            first, sharing = await create(master), await create(master, "k2")
            assert (await create(master, "")).operation_id == first.operation_id
            await give_up(master)
            await until(lambda: master.job.state.saved == 2, "the next pause")
            late = await create(master, "late")
            assert (await create(master, "")).operation_id == late.operation_id
            await commit(cluster, 2, operation=first.operation_id)
            assert made(await ended(master, first)) == made(await ended(master, sharing)) == (DONE, "at-2")
            await until(lambda: not master.job.operations.find(late.operation_id).after, "its turn")
            await give_up(master)
            await until(lambda: master.job.operations.find(late.operation_id).step, "a pause of its own")
            step = master.job.operations.find(late.operation_id).step
            assert step is not None
            assert step > 2
            await commit(cluster, step, operation=late.operation_id)
            assert made(await ended(master, late)) == (DONE, f"at-{step}")

    run_virtually(main)


async def give_up(master: Master) -> None:
    await master.term.writer.decide(
        lambda job, _: pause_checkpoint.give_up(job.state, job.trainers, job.members, "the test says so")
    )

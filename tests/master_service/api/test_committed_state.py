"""What is read by REST is what etcd has: another master would show it, too."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from master_service.leadership.master import Master
from tests.equipment.waiting import until
from tests.master_service.api.client import check_problem, client_of
from tests.master_service.cluster import MasterCluster, Storage, leading, running, spec_of, take
from tests.master_service.control.restoring import checkpoint, spec
from trireme_shared.protocol.records import UserFailure
from trireme_shared.protocol.records.checkpoints import CheckpointRef
from trireme_shared.protocol.records.operations import OperationState

PATHS = [
    "/v1/job",
    "/v1/task-summary",
    "/v1/tasks",
    "/v1/tasks/0",
    "/v1/members",
    "/v1/members/t1",
    "/v1/checkpoints",
]
FAILURE = UserFailure(error_type="ValueError", message="no")


class GatedStorage(Storage):
    """Verifies once `gate` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def verify(self, ref: CheckpointRef) -> None:
        await self.gate.wait()


async def begin_to_fail(master: Master) -> asyncio.Future[None]:
    """The job's end is decided, and not written: etcd does not answer."""
    reporting = asyncio.ensure_future(master.report_failure("t1", FAILURE))
    await until(lambda: master.job.state.phase.final, "the decision", 2)
    return reporting


@pytest.mark.parametrize("etcd_answers", [True, False])
async def test_a_state_that_is_decided_is_shown_once_it_is_written(etcd_answers: bool) -> None:
    cluster = MasterCluster(spec_of(max_user_failures=1))
    if not etcd_answers:
        cluster.ttl_s = 3.0
    async with running(cluster, "t1") as master, client_of(master) as client:
        await take(cluster, master)
        cluster.simulated.cut("m1")
        reporting = await begin_to_fail(master)
        reads = [asyncio.ensure_future(client.get(path)) for path in PATHS]
        if etcd_answers:
            await asyncio.sleep(0.2)
            assert not any(read.done() for read in reads)
            cluster.simulated.mend("m1")
            await reporting
            answers: list[Any] = [(await read).json() for read in reads]
            assert answers[0]["phase"] == "FAILED"
        else:
            async with leading(cluster.master("m2")) as second:
                assert second.job.state.phase.value == "RUNNING"
                for read in reads:
                    check_problem(await read, 503, "NOT_LEADER")
            await asyncio.wait([reporting])
            assert reporting.exception() is not None


async def test_an_operation_that_has_ended_is_shown_once_that_is_written() -> None:
    storage = GatedStorage()
    cluster = MasterCluster(spec(), storage)
    async with running(cluster, "t1") as master, client_of(master) as client:
        await checkpoint(cluster, 40)
        await until(lambda: master.job.members.latest, "the checkpoint to be seen")
        begun = (await client.post("/v1/checkpoints/at-40/verify")).json()["operation_id"]
        cluster.simulated.cut("m1")
        storage.gate.set()
        await until(lambda: master.term.operations.get(begun).state is OperationState.DONE, "the decision", 2)
        read = asyncio.ensure_future(client.get(f"/v1/operations/{begun}"))
        await asyncio.sleep(0.2)
        assert not read.done()
        cluster.simulated.mend("m1")
        assert (await read).json()["state"] == "DONE"

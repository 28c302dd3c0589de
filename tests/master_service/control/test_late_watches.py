"""What cannot be taken back is decided on the checkpoints that etcd has, also if a watch delivers them
late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from master_service.core.changes import Decision, RequireLatest
from master_service.core.decisions import lifecycle
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.cluster import KEYS, MasterCluster, leading, running, spec_of
from tests.master_service.control.restoring import checkpoint, names, spec
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.etcd.operations import Body
from trireme_shared.protocol.errors import NotLeader
from trireme_shared.protocol.records import FailureCause, Mode, Phase
from trireme_shared.protocol.records.checkpoints import CheckpointRef, OwnCheckpoints

LATE_S = 2.0


class LateTransport:
    """Watches of checkpoints deliver late."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.call, self.close = inner.call, inner.close

    async def stream(self, method: str, body: Body) -> AsyncGenerator[Body, None]:
        late = body["create_request"]["key"].startswith(KEYS.checkpoints.encode())
        async for message in self._inner.stream(method, body):
            if late:
                await asyncio.sleep(LATE_S)
            yield message


class LateCluster(MasterCluster):
    def etcd_of(self, client: str) -> Etcd:
        inner = self.simulated.transport(client)
        return Etcd(LateTransport(inner) if client.startswith("m") else inner)


def test_a_job_whose_first_checkpoint_was_just_finished_goes_back_to_it_and_does_not_start_over() -> None:
    async def main() -> None:
        cluster = LateCluster(spec(pservers=1))
        async with running(cluster, "t1") as master:
            await checkpoint(cluster, 40)
            await cluster.lose("pserver-0")
            await until(lambda: master.job.state.phase is not Phase.RUNNING, "the loss to be seen")
            state = master.job.state
            assert master.job.members.latest is None
            assert (state.phase, state.checkpoint) == (Phase.ROLLING_BACK, "at-40")
            await asyncio.sleep(3 * LATE_S)
            assert master.job.state == state
            await cluster.add_pserver(0)
            await cluster.restore(0, state)
            await until(lambda: master.job.state.phase is Phase.RUNNING, "the job to go on")
            assert "started_over" not in names(master)
            assert "checkpoint_unusable" not in names(master)

    run_virtually(main)


@pytest.mark.parametrize("kind", ["coordinated", "independent"])
def test_an_asynchronous_job_whose_first_checkpoint_was_just_finished_does_not_fail(kind: str) -> None:
    async def main() -> None:
        cluster = LateCluster(spec_of(checkpoint_kind=kind, pservers=2, mode=Mode.ASYNC))
        async with running(cluster, "t1") as master:
            if kind == "coordinated":
                await checkpoint(cluster, 1)
            else:
                ref = CheckpointRef(uuid="own-1", step=1, timeline=0, manifest="m")
                own = OwnCheckpoints(pserver=0, incarnation="i", timestamp="", checksum="", kept=(ref,))
                await cluster.etcd.put(KEYS.own_checkpoints(0), own.to_bytes())
            await cluster.lose("pserver-0")
            await until(
                lambda: master.job.state.absent or master.job.state.phase.final, "the loss to be seen"
            )
            assert (master.job.state.phase, master.job.state.absent) == (Phase.RUNNING, (0,))

    run_virtually(main)


def test_without_any_checkpoint_the_job_starts_over_as_before() -> None:
    async def main() -> None:
        cluster = LateCluster(spec(pservers=1))
        async with running(cluster, "t1") as master:
            await cluster.lose("pserver-0")
            await until(lambda: master.job.state.phase is Phase.WAITING, "the job to start over")
            assert "started_over" in names(master)

    run_virtually(main)


def test_a_checkpoint_that_is_finished_between_reading_and_writing_refuses_the_end_of_the_job() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as master:
            await checkpoint(cluster, 40)
            with pytest.raises(NotLeader):
                await master.writer.decide(
                    lambda job, _: (
                        lifecycle.fail(job.state, "too early", FailureCause.MEMBERS)
                        + Decision(None, (RequireLatest(0),))
                    )
                )
            await cluster.etcd.delete(KEYS.latest)
            async with leading(cluster.master("m2")) as second:
                assert second.job.state.phase is Phase.RUNNING

    run_virtually(main)

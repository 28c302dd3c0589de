"""Leases run out while etcd is silent: a leader waits for their members before it decides that they are
gone."""

from __future__ import annotations

import asyncio

import pytest

from master_service.leadership.master import Master
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.cluster import KEYS, MasterCluster, running
from tests.master_service.control.restoring import checkpoint, names, spec
from trireme_shared.platform.membership.directory import RETURN_S
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.records import JobState, Mode, Phase

SILENT_S = 20.0


async def silence(cluster: MasterCluster, master: Master) -> None:
    """Until the master leads again."""
    cluster.simulated.freeze()
    await asyncio.sleep(SILENT_S)
    cluster.simulated.thaw()
    await until(lambda: master.current_term is not None, "the master to lead again")


def lose_all(cluster: MasterCluster) -> None:
    for lease in cluster.leases.values():
        cluster.simulated.expire_lease(lease)


async def register_again(cluster: MasterCluster, since: dict[int, int]) -> None:
    for index, revision in since.items():
        await cluster.add_pserver(index)
        key = KEYS.pserver(index)
        found = await cluster.etcd.get(key)
        assert found is not None
        member = cluster.pserver_in(found).model_copy(update={"since": revision})
        await cluster.etcd.put(key, member.to_bytes(), found.lease)
    await cluster.add_trainer("t1")


def test_members_that_come_back_after_a_silence_go_on_where_they_were() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as master:
            await checkpoint(cluster, 40)
            before = master.job.state
            since = {0: master.job.members.pserver_revisions[0], 1: master.job.members.pserver_revisions[1]}
            await silence(cluster, master)
            lose_all(cluster)
            await asyncio.sleep(1.0)
            assert master.job.state == before
            await register_again(cluster, since)
            await asyncio.sleep(2 * RETURN_S)
            assert master.job.state == before
            assert "members_awaited" in names(master)
            await cluster.add_trainer("t2")
            await until(lambda: "t2" in master.job.trainers.names, "another trainer to be counted in")

    run_virtually(main)


def test_who_does_not_come_back_after_a_silence_is_gone() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as master:
            await checkpoint(cluster, 40)
            await silence(cluster, master)
            lose_all(cluster)
            began = clock.monotonic()
            await until(lambda: master.job.state.phase is Phase.ROLLING_BACK, "the job to go back")
            assert clock.monotonic() - began <= RETURN_S + 0.5

    run_virtually(main)


@pytest.mark.parametrize("silent", ["reported", "its lease was revoked", ""])
def test_a_death_that_is_proven_or_has_nothing_to_do_with_a_silence_is_not_waited_for(silent: str) -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as master:
            await checkpoint(cluster, 40)
            if silent:
                await silence(cluster, master)
                cluster.dead.add("http://pserver-1")
                if silent == "reported":
                    assert await master.report_suspect("pserver-1")
                else:
                    await cluster.lose("pserver-1")  # by the launcher, who saw it die
            else:
                await cluster.lose("pserver-1")
            await asyncio.sleep(0.5)
            assert master.job.state.phase is Phase.ROLLING_BACK

    run_virtually(main)


def test_an_absent_pserver_whose_lease_only_ran_out_is_back_with_nothing_lost() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec(mode=Mode.ASYNC, checkpoint_kind="coordinated"))

        def absent() -> tuple[int, ...]:
            state: JobState = master.job.state
            return state.absent

        async with running(cluster, "t1") as master:
            await checkpoint(cluster, 1)
            await until(lambda: master.job.members.latest, "the checkpoint to be seen")
            since = master.job.members.pserver_revisions[1]
            await cluster.lose("pserver-1")
            await until(lambda: absent() == (1,), "the loss to be seen")
            await register_again(cluster, {1: since})
            await until(lambda: absent() == (), "the pserver to be counted in")
            assert not master.job.losses.lost
            assert master.job.state.timeline == 0

    run_virtually(main)

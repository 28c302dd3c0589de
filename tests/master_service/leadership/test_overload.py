"""More requests than a master takes: those are refused, and its own work goes on."""

from __future__ import annotations

import asyncio

import pytest

from master_service.store import writer
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.cluster import MasterCluster, Storage, running, spec_of
from trireme_shared.protocol.errors import NotReady
from trireme_shared.protocol.records import TaskAnswer


def test_too_many_requests_are_refused_and_the_master_keeps_its_term(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_WAITING", 300)

    async def main() -> None:
        cluster = MasterCluster(spec_of(), Storage(2000))
        async with running(cluster, "t1") as master:
            term, asks = master.term, list[asyncio.Future[TaskAnswer]]()
            cluster.simulated.freeze()
            for _ in range(2):  # some wait in transactions that are under way, the others until there is room
                asks += [asyncio.ensure_future(master.acquire_task(cluster.ask(master))) for _ in range(600)]
                await asyncio.sleep(0.01)
            await asyncio.sleep(1.5)  # every second the master looks for late tasks
            cluster.simulated.thaw()
            answers = await asyncio.gather(*asks, return_exceptions=True)
            refused = [answer for answer in answers if isinstance(answer, NotReady)]
            assert 400 < len(refused) < 900
            assert len([answer for answer in answers if isinstance(answer, TaskAnswer)]) == 1200 - len(
                refused
            )
            await cluster.add_trainer("t2")
            await until(lambda: master.job.trainers.names == ("t1", "t2"), "t2 to be a member")
            assert master.term is term

    run_virtually(main)

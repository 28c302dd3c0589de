"""Many join at once: one generation for all who come within the window; nobody waits who comes alone, and no
death does."""

from __future__ import annotations

import asyncio

import pytest

from master_service.control.supervisor import Supervisor
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.cluster import MasterCluster, running, spec_of
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.records import Phase

WINDOW_S = 0.2
AT_ONCE_S = 0.05
QUIET_S = 1.0


def generations_of_forty_joins(seconds: float) -> int:
    made: list[int] = []

    async def main() -> None:
        cluster = MasterCluster(spec_of(join_window_s=WINDOW_S))
        async with running(cluster, "t0") as master:
            await asyncio.sleep(QUIET_S)
            before = master.job.state.generation
            for number in range(1, 41):
                await cluster.add_trainer(f"t{number}")
                await asyncio.sleep(seconds / 40)
            await until(lambda: len(master.job.trainers.names) == 41, "all to be counted in", 2.0)
            made.append(master.job.state.generation - before)

    run_virtually(main)
    return made[0]


def test_joins_within_the_window_make_one_generation_together() -> None:
    assert generations_of_forty_joins(1.0) <= 1 + 1.0 / WINDOW_S + 2  # etcd's answers take time, too


def test_without_the_window_almost_every_join_is_a_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(_: Supervisor) -> None:
        pass

    monkeypatch.setattr(Supervisor, "_gather_joins", at_once)
    assert generations_of_forty_joins(1.0) > 30


def test_a_trainer_that_comes_alone_is_counted_in_at_once_and_the_next_one_after_the_window() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(join_window_s=WINDOW_S))
        async with running(cluster, "t1") as master:
            for name in ("t2", "t3"):
                await asyncio.sleep(QUIET_S)
                await cluster.add_trainer(name)
                await until(
                    lambda name=name: name in master.job.trainers.names, f"{name} to be counted in", AT_ONCE_S
                )
            begun = clock.monotonic()
            await cluster.add_trainer("t4")
            await until(
                lambda: "t4" in master.job.trainers.names, "t4 to be counted in", WINDOW_S + AT_ONCE_S
            )
            assert clock.monotonic() - begun > WINDOW_S / 2

    run_virtually(main)


def test_a_death_within_the_window_is_handled_at_once_and_takes_the_joins_along() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(join_window_s=WINDOW_S))
        async with running(cluster, "t1", "t2") as master:
            await asyncio.sleep(QUIET_S)
            for name in ("t3", "t4"):
                await cluster.add_trainer(name)
                await asyncio.sleep(AT_ONCE_S / 2)
            assert "t4" not in master.job.trainers.names
            await cluster.lose("t1")
            await until(lambda: "t1" not in master.job.trainers.names, "t1 to be gone", AT_ONCE_S)
            assert master.job.trainers.names == ("t2", "t3", "t4")

    run_virtually(main)


def test_a_pserver_that_dies_within_the_window_is_handled_at_once() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(mode="sync", pservers=2, join_window_s=WINDOW_S))
        async with running(cluster, "t1") as master:
            await asyncio.sleep(QUIET_S)
            for name in ("t2", "t3"):
                await cluster.add_trainer(name)
                await asyncio.sleep(AT_ONCE_S / 2)
            await cluster.lose("pserver-1")
            await until(lambda: master.job.state.phase is Phase.WAITING, "the job to start over", AT_ONCE_S)

    run_virtually(main)

"""A parameter server that freezes during a pause: how long training stands still, and when the next pause
begins."""

from __future__ import annotations

import asyncio
import math
from contextlib import nullcontext

import pytest

from master_service.control.pause_runner import ANSWER_S, COPY_LIMIT_S, SILENT_S, FrozenPservers
from master_service.leadership.master import Master
from tests.equipment.replaced import replaced
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.cluster import KEYS, MasterCluster, running
from tests.master_service.control.pausing import (
    checkpointing,
    copy,
    copy_slowly,
    cut_of,
    cutting,
    names,
    spec,
)
from trireme_shared.platform.etcd.operations import KEEP_ALIVE
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.records import Phase


async def pause_with_a_frozen_pserver(cluster: MasterCluster, master: Master) -> float:
    """The seconds for which training stands still if pserver-0 copies and pserver-1 freezes after the cut."""
    await checkpointing(master)
    began = clock.monotonic()
    await copy(cluster, 0, await cutting(cluster, master))
    await until(lambda: master.job.state.phase is Phase.RUNNING, "training to go on", 2 * COPY_LIMIT_S)
    return clock.monotonic() - began


def test_a_pserver_that_freezes_after_the_cut_ends_the_pause_and_no_other_begins_before_it_answers() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec(lease_ttl_s=3600.0))
        async with running(cluster, "t1") as master:
            assert await pause_with_a_frozen_pserver(cluster, master) <= SILENT_S + 0.1
            reason = "checkpoint 1 was given up: pserver-1 gave no sign of life for 1.5 s"
            assert (master.job.state.reason, await cluster.etcd.get(KEYS.pause)) == (reason, None)
            await asyncio.sleep(300)
            assert (master.job.state.phase, master.job.state.saved) == (Phase.RUNNING, 1), (
                "it is frozen as before"
            )
            woke = clock.monotonic()
            await cluster.etcd.transport.call(KEEP_ALIVE, {"ID": cluster.leases["pserver-1"]}, 1.0)
            uuid = await cutting(cluster, master)
            assert clock.monotonic() - woke < 3
            await asyncio.sleep(2 * SILENT_S - ANSWER_S)
            assert master.job.state.phase is Phase.CHECKPOINTING, "perhaps it was slow: it has twice the time"
            for index in range(2):
                await copy(cluster, index, uuid)
            await until(lambda: master.job.state.phase is Phase.RUNNING, "training to go on")
            cut = await cut_of(cluster, uuid)
            assert cut is not None
            assert cut.copied

    run_virtually(main)


def test_without_the_limit_a_frozen_pserver_stops_training_for_as_long_as_a_copy_may_take() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        async with running(cluster, "t1") as master:
            with replaced(FrozenPservers, "deadline", lambda *_: math.inf):
                assert await pause_with_a_frozen_pserver(cluster, master) > COPY_LIMIT_S

    run_virtually(main)


def test_without_the_question_whether_it_answers_again_a_frozen_pserver_costs_pause_after_pause() -> None:
    async def answers(*_: object) -> bool:
        return True

    async def main() -> None:
        cluster = MasterCluster(spec(lease_ttl_s=3600.0))
        async with running(cluster, "t1") as master:
            with replaced(FrozenPservers, "answer_again", answers):
                await pause_with_a_frozen_pserver(cluster, master)
                await asyncio.sleep(300)
                assert master.job.state.saved > 2

    run_virtually(main)


@pytest.mark.parametrize("heard", [True, False])
def test_a_long_copy_is_not_taken_for_a_frozen_pserver_because_it_says_how_far_it_is(heard: bool) -> None:
    async def main() -> None:
        cluster = MasterCluster(spec())
        ablation = nullcontext() if heard else replaced(FrozenPservers, "hear", lambda *_: None)
        async with running(cluster, "t1") as master:
            with ablation:
                uuid = await cutting(cluster, master)
                await copy(cluster, 0, uuid)
                await copy_slowly(cluster, 1, 20.0)
                await copy(cluster, 1, uuid)
                await until(lambda: master.job.state.phase is Phase.RUNNING, "training to go on")
                assert ("checkpoint_copied" in names(master), "checkpoint_given_up" in names(master)) == (
                    heard,
                    not heard,
                )

    run_virtually(main)

"""An etcd that does not answer for a while: what a master says about it."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from tests.equipment.virtual_loop import run_virtually
from tests.master_service.cluster import MasterCluster, done, running, spec_of, take


class PatientCluster(MasterCluster):
    """Its masters keep the lock for a minute without an answer."""

    def master_options(self) -> dict[str, Any]:
        return super().master_options() | {"ttl_s": 60.0}


def test_a_writer_that_gets_no_answer_says_so_a_few_times_and_once_when_it_gets_one() -> None:
    async def main() -> None:
        cluster = PatientCluster(spec_of())
        async with running(cluster, "t1") as master:
            task = await take(cluster, master)
            cluster.simulated.stop()
            late = asyncio.ensure_future(master.complete_task(task.task_id, done(task)))
            await asyncio.sleep(25)
            assert not late.done()
            cluster.simulated.start()
            await late

    structlog.reset_defaults()  # another test may have raised the level
    with structlog.testing.capture_logs() as entries:
        run_virtually(main)
    told = [entry["event"] for entry in entries if entry.get("room") == "writer"]
    assert told == ["write_unanswered"] * 2 + ["write_answered"]

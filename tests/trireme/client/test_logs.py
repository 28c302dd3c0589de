"""A log is followed by the typed client until its job has ended, through a change of the master."""

from __future__ import annotations

import asyncio
from pathlib import Path

from master_service.api.app import make_app
from master_service.api.routes.logs import LogSource
from tests.equipment.waiting import until
from tests.master_service.api.test_logs import virtually, write
from tests.master_service.many_jobs import Jobs, job_of
from tests.trireme.cli.history.test_remote_logs import Elsewhere
from trireme_shared.protocol.records.cluster import Standing


def test_a_log_is_followed_to_the_end_of_its_job_through_a_change_of_the_master(tmp_path: Path) -> None:
    log = write(tmp_path / "a" / "h-trainer-0-1.log", "one", "two")
    source, elsewhere, lines = LogSource((str(tmp_path),), by_job=True), Elsewhere(), list[str]()

    async def follow() -> None:
        async with elsewhere.client("http://localhost") as client:
            assert [each.log async for each in client.list_logs("a")] == ["h-trainer-0-1"]
            async for line in client.follow_log("a", "h-trainer-0-9f2c51ab03de", tail=1):
                lines.append(line.text)

    async def main() -> None:
        jobs = Jobs()
        async with jobs.leading("m1") as leader:
            await leader.create_job(job_of("a"), None)
            elsewhere.app = make_app(leader, None, source)
            following = asyncio.ensure_future(follow())
            await until(lambda: lines == ["two"], "the last line")
            write(log, "three")
            await until(lambda: lines[1:] == ["three"], "a new line")
            elsewhere.app = None
        write(log, "four")
        async with jobs.leading("m2") as leader:
            elsewhere.app = make_app(leader, None, source)
            async with jobs.pool(2, 1):
                await until(lambda: leader.state.job("a").standing is Standing.COMPLETED, "the job to end")
                write(log, "five")
                await asyncio.wait_for(following, 60)
        assert lines == ["two", "three", "four", "five"]

    virtually(main)

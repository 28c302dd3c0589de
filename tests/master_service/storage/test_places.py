"""Where a job that is submitted may have its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from master_service.storage.places import check_place
from tests.master_service.api.client import check_problem, client_of
from tests.master_service.api.test_cluster_rest import wanted
from tests.master_service.many_jobs import Jobs
from trireme_shared.protocol.errors import InvalidArgument


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("s3://bucket/jobs/a", "s3://bucket/jobs"),
        ("s3://bucket/jobs", "s3://bucket/jobs/"),
        ("s3://bucket/a", "s3://bucket"),
        ("memory://cluster/a/b", "memory://cluster"),
        ("file:///data/jobs/a", "/data/jobs"),
        ("/data/jobs/a", "file:///data/jobs"),
    ],
)
def test_a_place_below_an_allowed_one_is_taken(url: str, allowed: str) -> None:
    check_place(url, ("/elsewhere", allowed))


@pytest.mark.parametrize(
    "url",
    [
        "/etc/cron.d",
        "/data/jobs/../../etc/cron.d",
        "/data/jobs-of-others/a",
        "../../etc",
        "~/.ssh",
        "file:/etc/cron.d",
        "file:///etc/cron.d",
        "local:///etc/cron.d",
        "s3://bucket/jobs/a",
        "s3://bucket/runs/../jobs",
        "s3://bucket/runs/%2e%2e/jobs",
        "s3://bucket/runs-of-others/a",
        "s3://other/runs/a",
        "s3://user@bucket/runs/a",
        "s3a://bucket/runs/a",
        "simplecache::s3://bucket/runs/a",
        "sftp://host/data/jobs/a",
        "data:,a",
    ],
)
def test_any_other_place_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^storage .*"):
        check_place(url, ("/data/jobs", "s3://bucket/runs"))


def test_a_symbolic_link_out_of_the_allowed_place_is_refused_and_one_inside_is_taken(tmp_path: Path) -> None:
    jobs, outside = tmp_path / "jobs", tmp_path / "outside"
    (jobs / "a").mkdir(parents=True)
    outside.mkdir()
    (jobs / "out").symlink_to(outside)
    (jobs / "inside").symlink_to(jobs / "a")
    check_place(str(jobs / "inside" / "b"), (str(jobs),))
    with pytest.raises(InvalidArgument, match="is not below"):
        check_place(str(jobs / "out" / "b"), (str(jobs),))
    linked = tmp_path / "linked"
    linked.symlink_to(jobs)
    check_place(str(linked / "a"), (str(jobs),))
    check_place(str(jobs / "a"), (str(linked),))


def test_a_refusal_shows_no_password() -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_place("sftp://me:hidden@host/a", ("sftp://me:other@host/b",))
    assert "hidden" not in caught.value.message
    assert "other" not in caught.value.message


async def test_by_rest_a_job_and_a_schedule_write_below_the_clusters_storage_or_an_allowed_place() -> None:
    jobs = Jobs()
    async with jobs.leading(storage_allowed=("/data/allowed",)) as leader, client_of(leader) as client:

        async def post(path: str, **values: Any) -> Any:
            return await client.post(path, json=wanted(**values))

        for storage in (
            "/etc/cron.d",
            "/data/allowed/../../etc",
            "memory://other/a",
            "memory://cluster2",
        ):
            schedule = await post("/v1/schedules", name="s", cron="0 0 * * *", storage=storage)
            for refused in (await post("/v1/jobs", name="a", storage=storage), schedule):
                problem = check_problem(refused, 400, "INVALID_ARGUMENT")
                assert storage in problem["detail"]
        assert not leader.state.jobs
        assert not leader.state.schedules
        for number, storage in enumerate(("memory://cluster/own/a", "/data/allowed/b", "")):
            made = await post("/v1/jobs", name=f"j{number}", storage=storage)
            assert made.status_code == 201, made.text
        assert [job.spec.storage for job in leader.state.jobs.values()] == [
            "memory://cluster/own/a",
            "/data/allowed/b",
            "memory://cluster/j2",
        ]

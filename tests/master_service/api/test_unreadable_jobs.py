"""REST lists, explains and deletes a job that the master's version cannot read, bounds what enters, and tells
who runs which version."""

from __future__ import annotations

import json

import httpx

from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.api.client import check_problem, client_of
from tests.master_service.api.test_cluster_rest import SETTINGS, wanted
from tests.master_service.many_jobs import Jobs, job_of
from trireme.client.exchange import get
from trireme_shared import __version__
from trireme_shared.protocol.records.job_spec import SPEC_BYTES
from trireme_shared.protocol.records.state_schema import SCHEMA
from trireme_shared.protocol.rest import JobView


def test_an_unreadable_job_is_listed_with_the_reason_and_deleted() -> None:
    async def main() -> None:
        jobs = Jobs()
        document = json.loads(job_of("a").to_bytes())
        document["spec"]["mode"] = "semi-synchronous"
        await jobs.etcd.put(jobs.keys.job("a"), json.dumps(document).encode())
        async with jobs.leading() as leader, client_of(leader) as client:
            (listed,) = (await client.get("/v1/jobs")).json()["jobs"]
            assert (listed["job"], listed["state"], listed["standing"]) == ("a", "UNREADABLE", "UNREADABLE")
            assert "semi-synchronous" in listed["reason"]
            assert (await client.get("/v1/jobs?state=UNREADABLE")).json()["jobs"] == [listed]
            whole = (await client.get("/v1/jobs/a")).json()
            assert (whole["phase"], whole["reason"]) == ("UNREADABLE", listed["reason"])
            told = (await client.get("/v1/jobs/a/explanation")).json()
            assert (told["code"], told["details"]) == ("JOB_UNREADABLE", [listed["reason"]])
            assert "trireme delete a" in told["hints"]
            check_problem(await client.post("/v1/jobs/a/cancel"), 409, "CONFLICT")
            metrics = (await client.get("/metrics")).text
            assert 'trireme_cluster_jobs{standing="unreadable"} 1.0' in metrics
            deleted = await client.delete("/v1/jobs/a?wait_s=5")
            assert (deleted.status_code, deleted.json()["state"]) == (202, "DONE")
            assert (await client.get("/v1/jobs")).json()["jobs"] == []

    run_virtually(main)


def test_a_request_with_a_field_that_is_not_known_is_refused() -> None:
    """etcd may have such fields, of another version; in a request they are misspelt."""

    async def main() -> None:
        jobs = Jobs()
        async with jobs.leading() as leader, client_of(leader) as client:
            for body, where in (
                (wanted("a", colour="red"), "body.colour"),
                (wanted("a") | {"settings": SETTINGS | {"warp_factor": 9}}, "body.settings.warp_factor"),
                (wanted("a", scheduling={"mood": "good"}), "body.scheduling.mood"),
            ):
                answer = await client.post("/v1/jobs", json=body)
                assert answer.status_code == 422, answer.text
                assert [part["location"] for part in answer.json()["errors"]] == [where]

    run_virtually(main)


def test_a_spec_that_is_too_large_is_refused_with_both_sizes() -> None:
    async def main() -> None:
        jobs = Jobs()
        files = [f"s3://bucket/{'folder' * 8}/{number:06}.txt" for number in range(6000)]
        settings = SETTINGS | {"dataset": {"kind": "text_lines", "urls": files}}
        async with jobs.leading() as leader, client_of(leader) as client:
            for path, more in (("/v1/jobs", {}), ("/v1/schedules", {"cron": "* * * * *"})):
                answer = await client.post(path, json=wanted("a", **more) | {"settings": settings})
                problem = check_problem(answer, 413, "TOO_LARGE")
                assert f"at most {SPEC_BYTES} are taken; dataset alone" in problem["detail"]
            assert leader.state.jobs == {}
            assert leader.state.schedules == {}

    run_virtually(main)


def test_versions_of_the_master_its_members_and_the_pool_are_told() -> None:
    async def main() -> None:
        jobs = Jobs(tasks=200)
        async with jobs.leading() as leader, client_of(leader) as client, jobs.pool(2, 1) as places:
            for place in places[:2]:
                place.member = place.member.with_fields(trireme_version="0.2.0")
            await leader.create_job(job_of("a"), None)
            await until(lambda: len(jobs.taken) > 4, "some tasks")
            told = (await client.get("/v1/version")).json()
            assert (told["version"], told["state_schema"]) == (__version__, SCHEMA)
            assert told["places"] == {"0.2.0": 2, "": 1}
            assert told["members"] == {"": 3}
            pool = (await client.get("/v1/pool-members")).json()["members"]
            assert sorted(member["trireme_version"] for member in pool) == ["", "0.2.0", "0.2.0"]

    run_virtually(main)


def test_a_client_reads_the_answer_of_a_newer_master() -> None:
    """Its settings have a field more, which this version forbids in requests."""

    async def main() -> None:
        jobs = Jobs()
        async with jobs.leading() as leader, client_of(leader) as client:
            await leader.create_job(job_of("a"), None)
            answer = await client.get("/v1/jobs/a")
            newer = answer.json()
            newer["settings"]["warp_factor"] = 9
            assert get("/v1/jobs/a", JobView).read(httpx.Response(200, json=newer)).job == "a"

    run_virtually(main)

"""ETag, If-None-Match and If-Match: who changes what somebody else has changed meanwhile is told so, and
changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from master_service.api.app import api_of
from master_service.api.openapi.document import operations, takes
from master_service.core.decisions.requests import Expected, version_of_schedule
from tests.equipment.cluster.crash_point import StoppingProcess
from tests.equipment.replaced import replaced
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.api.client import check_problem
from tests.master_service.api.requests_by_key import WANTED, World, client_of
from tests.master_service.api.test_cluster_rest import wanted
from tests.master_service.many_jobs import Jobs
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.records import JobState, Phase
from trireme_shared.protocol.records.cluster import Standing
from trireme_shared.protocol.times import rfc3339

CRON = {**WANTED, "name": "s", "cron": "30 2 * * *"}
CHANGED = (404, 412)  # 404: it is gone


async def version_at(client: httpx.AsyncClient, path: str) -> str:
    """As the body and the ETag have it."""
    read = await client.get(path)
    version: str = read.json()["version"]
    assert read.headers["etag"].startswith(f'"{version}.')
    assert len(version) == 16
    return version


def only(version: str, key: str = "") -> dict[str, str]:
    return {"If-Match": f'"{version}"'} | ({"Idempotency-Key": key} if key else {})


def test_an_answer_that_the_caller_has_is_not_sent_again() -> None:
    async def main() -> None:
        world = World("cluster")
        await world.prepare()
        async with world.leading("m1") as leader, client_of(leader) as client:
            assert (await client.post("/v1/schedules", json=CRON)).status_code == 201
            await until(lambda: leader.state.job("waits").reason, "the schedule to say for what it waits")
            for path in ("/v1/jobs/waits", "/v1/pool-members/a", "/v1/schedules/s"):
                read = await client.get(path)
                tag = read.headers["etag"]
                for known in (tag, f'"x", W/{tag}', "*"):
                    for method in ("GET", "HEAD"):
                        again = await client.request(method, path, headers={"If-None-Match": known})
                        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag), (
                            known
                        )
                other = await client.get(
                    path, headers={"If-None-Match": only(read.json()["version"])["If-Match"]}
                )
                assert other.content == read.content, "the version alone is no tag of the answer"
                for malformed in ("", "x", '"x', '"x" "y"', "*, *"):
                    answer = await client.get(path, headers={"If-None-Match": malformed})
                    check_problem(answer, 400, "INVALID_ARGUMENT")
            check_problem(
                await client.get("/v1/pool-members/none", headers={"If-None-Match": "*"}), 404, "NOT_FOUND"
            )

    run_virtually(main)


def test_progress_changes_the_answer_and_its_tag_but_not_the_version() -> None:
    async def main() -> None:
        jobs = Jobs(tasks=12, task_s=1.0)
        async with jobs.leading() as leader, client_of(leader) as client, jobs.pool(2, 1):
            await client.post("/v1/jobs", json=wanted("a"))
            await until(lambda: len(jobs.taken) > 1, "the first tasks")
            first = await client.get("/v1/jobs/a")
            await until(lambda: len(jobs.taken) > 5, "more tasks")
            later = await client.get("/v1/jobs/a", headers={"If-None-Match": first.headers["etag"]})
            assert later.status_code == 200, "a cache would show progress of before"
            assert later.json()["progress"] != first.json()["progress"]
            assert later.json()["version"] == first.json()["version"]
            [listed] = (await client.get("/v1/jobs")).json()["jobs"]
            assert listed["version"] == first.json()["version"]
            paused = await client.post("/v1/jobs/a/pause", headers={"If-Match": first.headers["etag"]})
            assert paused.status_code == 202, "a step of training made the caller's tag useless"
            assert await version_at(client, "/v1/jobs/a") != first.json()["version"]

    run_virtually(main)


Writer = tuple[str, str]
RIVALS: dict[str, tuple[str, Writer, Writer, Callable[[Any], object], list[object]]] = {
    "a job is paused or cancelled": (
        "/v1/jobs/waits",
        ("POST", "/pause"),
        ("POST", "/cancel"),
        lambda leader: leader.state.job("waits").standing,
        [Standing.PAUSED, Standing.CANCELLED],
    ),
    "a failed job is resumed or deleted": (
        "/v1/jobs/failed",
        ("POST", "/resume"),
        ("DELETE", "?wait_s=10"),
        lambda leader: "failed" in leader.state.jobs and leader.state.job("failed").standing,
        [Standing.QUEUED, False],
    ),
    "a pool member is drained twice": (
        "/v1/pool-members/a",
        ("POST", "/drain"),
        ("POST", "/drain"),
        lambda leader: ("trainer", "a") in leader.state.drains,
        [True, True],
    ),
}


async def rivals_at_once(name: str) -> None:
    path, first, second, effect, effects = RIVALS[name]
    for order in (1, -1):
        world = World("cluster")
        await world.prepare()
        async with world.leading("m1") as leader, client_of(leader) as client:
            version = await version_at(client, path)
            asked = [
                client.request(method, path + action, headers=only(version, key))
                for (method, action), key in ((first, "one"), (second, "two"))
            ][::order]
            answers = (await asyncio.gather(*asked))[::order]
            good = [answer.is_success for answer in answers]
            assert sorted(good) == [False, True], [answer.text for answer in answers]
            refused = answers[good.index(False)]
            assert refused.status_code in CHANGED
            if refused.status_code == 412:
                problem = check_problem(refused, 412, "PRECONDITION_FAILED")
                assert problem["details"]["expected"] == [version]
                assert problem["details"]["version"] not in ("", version)
            assert effect(leader) == effects[good.index(True)]


@pytest.mark.parametrize("name", RIVALS)
def test_of_two_who_change_what_they_read_one_does_and_the_other_is_told(name: str) -> None:
    run_virtually(rivals_at_once, name)


@pytest.mark.parametrize("name", RIVALS)
def test_without_the_comparison_both_do(name: str) -> None:
    with replaced(Expected, "_check", lambda *_: None), pytest.raises(AssertionError):
        run_virtually(rivals_at_once, name)


async def rivals_at_two_masters(name: str, turns: int) -> bool:
    """The master dies after so many turns of the first request. The second one asks the next master, then the
    first one asks again there. Whether the first one was answered before."""
    path, (method, action), (other_method, other_action), effect, effects = RIVALS[name]
    world, process = World("cluster"), StoppingProcess("m1")
    await world.prepare()
    async with world.leading("m1", process) as leader:

        async def ask(master: Any, method: str, action: str, key: str) -> httpx.Response:
            async with client_of(master) as client:
                return await client.request(method, path + action, headers=only(version, key))

        async with client_of(leader) as client:
            version = await process.spawn(version_at(client, path))
        call = process.spawn(ask(leader, method, action, "one"))
        process.last_turn = process.turns + turns
        await until(lambda: call.done() or process.dead, "the request to end")
        answered = call.done()
        process.kill()
        async with world.leading("m2") as successor:
            if not answered:
                async with client_of(successor) as client:
                    assert (await version_at(client, path) == version) is (effect(successor) != effects[0])
            second = await ask(successor, other_method, other_action, "two")
            again = await ask(successor, method, action, "one")
            assert [again.is_success, second.is_success].count(True) == 1, (turns, again.text, second.text)
            assert not answered or again.text == call.result().text
            assert (second if again.is_success else again).status_code in CHANGED
            assert effect(successor) == effects[0 if again.is_success else 1], turns
    return answered


async def at_each_turn(name: str) -> int:
    turns = 1
    while not await rivals_at_two_masters(name, turns):
        turns += 1
    return turns


@pytest.mark.parametrize("name", RIVALS)
def test_one_of_two_wins_whenever_the_master_changes_between_them(name: str) -> None:
    assert run_virtually(at_each_turn, name, shuffled=False) > 2, (
        "the master was never killed while it worked"
    )


def test_what_is_expected_is_checked_before_anything_else_changes() -> None:
    async def main() -> None:
        world = World("cluster")
        await world.prepare()
        async with world.leading("m1") as leader, client_of(leader) as client:
            resumed = await client.post("/v1/jobs/failed/resume", headers=only("0" * 16))
            check_problem(resumed, 412, "PRECONDITION_FAILED")
            found = await leader.etcd.get(leader.keys.keys_of("failed").state)
            assert JobState.model_validate_json(found.value).phase is Phase.FAILED, "it was opened again"
            check_problem(
                await client.delete("/v1/jobs/failed", headers=only("0" * 16)), 412, "PRECONDITION_FAILED"
            )
            assert leader.state.job("failed").wanted == "run"
            for nothing in ('W/"x"', '"x"', '""', f'W/"{await version_at(client, "/v1/jobs/waits")}"'):
                answer = await client.post("/v1/jobs/waits/cancel", headers={"If-Match": nothing})
                check_problem(answer, 412, "PRECONDITION_FAILED")
            for malformed in ("", "x", '"x', '"x" "y"', '*, "x"', '"\\u00e4"x'):
                answer = await client.post("/v1/jobs/waits/cancel", headers={"If-Match": malformed})
                check_problem(answer, 422, "INVALID_ARGUMENT")
            check_problem(
                await client.post("/v1/jobs/none/cancel", headers={"If-Match": "*"}), 404, "NOT_FOUND"
            )
            many = {"If-Match": f'"x" , "{await version_at(client, "/v1/jobs/waits")}.y",W/"z"'}
            assert (await client.post("/v1/jobs/waits/cancel", headers=many)).status_code == 202
            assert (await client.delete("/v1/jobs/waits", headers={"If-Match": "*"})).status_code == 202

    run_virtually(main)


def test_a_schedule_of_the_same_name_that_was_created_anew_is_not_deleted() -> None:
    async def main() -> None:
        jobs = Jobs()
        async with jobs.leading() as leader, client_of(leader) as client:
            created = (await client.post("/v1/schedules", json=CRON)).json()["create_time"]
            version = await version_at(client, "/v1/schedules/s")
            ran = {
                "next_time": "2100-01-01T00:00:00Z",
                "last_time": created,
                "last_job": "s-1",
                "reason": "created",
            }
            assert version_of_schedule(leader.state.schedule("s").model_copy(update=ran)) == version
            await until(lambda: rfc3339(clock.wall_time()) != created, "the next millisecond")
            assert (await client.delete("/v1/schedules/s", headers=only(version))).status_code == 200
            await client.post("/v1/schedules", json=CRON)
            check_problem(
                await client.delete("/v1/schedules/s", headers=only(version)), 412, "PRECONDITION_FAILED"
            )
            assert "s" in leader.state.schedules

    run_virtually(main)


def test_a_deletion_that_was_begun_is_finished_by_the_same_request() -> None:
    async def main() -> None:
        jobs, may_go_on = Jobs(), asyncio.Event()

        async def remove(_: Any) -> None:
            await may_go_on.wait()

        async with jobs.leading(remove_files=remove) as leader, client_of(leader) as client:
            await client.post("/v1/jobs", json=wanted("a"))
            await client.post("/v1/jobs/a/cancel")
            headers = only(await version_at(client, "/v1/jobs/a"))
            begun = (await client.delete("/v1/jobs/a?wait_s=5", headers=headers)).json()
            assert (begun["kind"], begun["state"]) == ("DELETE", "RUNNING")
            may_go_on.set()
            again = (await client.delete("/v1/jobs/a?wait_s=5", headers=headers)).json()
            assert (again["operation_id"], again["state"]) == (begun["operation_id"], "DONE")
            assert leader.state.jobs == {}

    run_virtually(main)


COMPARED = {
    *("pauseJob", "resumeJob", "cancelJob", "deleteJob", "deleteSchedule"),
    *("drainPoolMember", "undrainPoolMember"),
}


def test_if_match_is_taken_where_it_is_documented_and_refused_elsewhere() -> None:
    async def main() -> None:
        world = World("cluster")
        await world.prepare()
        async with world.leading("m1") as leader, client_of(leader) as client:
            for method, path, operation in operations(api_of(clustered=True).openapi()):
                compared = takes(operation, "If-Match")
                assert compared is ("412" in operation["responses"]) is (operation["operationId"] in COMPARED)
                if method == "GET" or compared or "task-leases" in path:
                    continue
                asked = path.format(
                    **dict.fromkeys(
                        ("job", "member_id", "checkpoint_id", "resize_id", "member", "task_id"), "none"
                    )
                )
                problem = check_problem(
                    await client.request(method, asked, headers={"If-Match": '"x"'}), 422, "INVALID_ARGUMENT"
                )
                assert "header.If-Match" in str(problem["errors"]), path

    run_virtually(main)

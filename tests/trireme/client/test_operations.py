"""The typed client and the API's own document agree: paths, parameters, answers. Then it drives a cluster's
leader, in virtual time."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from functools import cache
from typing import Any

import httpx
import pytest
from starlette.routing import compile_path

from clients.derive_sync import DERIVED, derived
from clients.write_openapi import OPENAPI
from master_service.api.app import api_of, make_app
from master_service.core.state import kept
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.many_jobs import Jobs
from trireme.client import ONLY_JOB, AsyncClient, Client, CreateJob, CreateSchedule, JobSettings, Source
from trireme.data import TextLines
from trireme_shared.protocol.errors import (
    Conflict,
    CursorExpired,
    InvalidArgument,
    NotFound,
    PreconditionFailed,
)
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.cluster import Standing

OF_MEMBERS = {
    *(
        "acquireTask",
        "reportTaskProgress",
        "completeTask",
        "failTask",
        "reportMetrics",
        "reportSuspect",
        "reportFailure",
    ),
    *("scrapeMetrics", "checkHealth", "checkReadiness"),  # for monitoring
}
BESIDE = {"wait_for_job", "wait_for_operation", "wait_for_resize", "follow_events", "follow_log", "aclose"}
SETTINGS = JobSettings(
    dataset=TextLines("train.txt"),
    mode="async",
    checkpoint_kind="independent",
    global_batch_size=8,
    records_per_task=10,
    max_discarded_fraction=1.0,
)
NAMES = {"job": "a/b", "schedule": "s", "task_id": "7", "member_id": "m", "member": "m", "checkpoint_id": "c"}
NAMES |= {"name": "loss", "resize_id": "r", "operation_id": "o", "log": "trainer-0"}
BODIES = {
    "createJob": {"job": CreateJob(name="a", settings=SETTINGS, script="train.py")},
    "createSchedule": {
        "schedule": CreateSchedule(name="a", settings=SETTINGS, script="train.py", cron="1 2 3 4 5")
    },
}
SOURCE_OF_JOB = Source(file_name="train.py", text="print('hello')")


def new_job(name: str) -> CreateJob:
    return CreateJob(name=name, settings=SETTINGS, source=SOURCE_OF_JOB)


def client_of(leader: Any) -> AsyncClient:
    return AsyncClient("http://master", token="", transport=httpx.ASGITransport(make_app(leader)))


@cache
def documented() -> dict[str, tuple[str, str, dict[str, Any]]]:
    """operationId -> method, path, operation; of a cluster's leader."""
    paths = json.loads(OPENAPI.read_bytes())["paths"]
    return {
        operation["operationId"]: (method.upper(), path, operation)
        for path, operations in paths.items()
        for method, operation in operations.items()
    }


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def methods(client: type) -> dict[str, Any]:
    return {name: method for name, method in inspect.getmembers(client, inspect.isfunction) if name[0] != "_"}


def test_every_operation_has_a_method_and_every_method_an_operation():
    operations = {snake(name) for name in documented() if name not in OF_MEMBERS}
    assert methods(AsyncClient).keys() == operations | BESIDE
    assert {name.replace("aclose", "close") for name in methods(AsyncClient)} == methods(Client).keys()


@pytest.mark.parametrize("name", sorted(documented().keys() - OF_MEMBERS))
async def test_a_method_sends_what_the_document_says_and_reads_its_answer(name: str):
    method, path, operation = documented()[name]
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(404, json={"code": "NOT_FOUND", "detail": "nothing is here"})

    possible: dict[str, Any] = {
        **NAMES,
        "wait_s": 3.0,
        "state": "DONE",
        "key": "k",
        "after": 5,
        "page_size": 9,
    }
    possible["if_match"] = "v"
    possible |= BODIES.get(name, {})
    asks = getattr(AsyncClient, snake(name))
    given = {name: value for name, value in possible.items() if name in inspect.signature(asks).parameters}
    async with AsyncClient("http://master", token="t", transport=httpx.MockTransport(answer)) as client:
        call = asks(client, **given)
        with pytest.raises(NotFound):
            await (anext(call) if hasattr(call, "__anext__") else call)
    [request] = asked
    path = path.format(**NAMES | {"job": "a%2Fb"})
    assert (request.method, request.url.raw_path.decode().partition("?")[0]) == (method, path)
    parameters = operation.get("parameters", [])
    assert set(request.url.params) <= {each["name"] for each in parameters if each["in"] == "query"}
    if method == "POST":
        assert request.headers["Idempotency-Key"] == "k"
    compared = any(each["name"] == "If-Match" for each in parameters)
    assert request.headers.get("If-Match") == ('"v"' if compared else None)
    assert ("requestBody" in operation) == bool(request.content)
    assert request.headers["Authorization"] == "Bearer t"


async def test_the_only_job_of_a_master_is_asked_for_without_its_name():
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(404, json={"code": "NOT_FOUND", "detail": "nothing is here"})

    of_master = {
        str(route.path)
        for included in api_of(clustered=False).routes
        for route in included.effective_route_contexts()  # type: ignore[attr-defined]
    }
    for name, (method, path, _) in sorted(documented().items()):
        unnamed = path.removeprefix("/v1/jobs/{job}")
        if name in OF_MEMBERS or unnamed == path or not {f"/v1{unnamed}", f"/v1/job{unnamed}"} & of_master:
            continue
        call = getattr(AsyncClient, snake(name))
        given = {each: value for each, value in NAMES.items() if each in inspect.signature(call).parameters}
        async with AsyncClient("http://master", token="", transport=httpx.MockTransport(answer)) as client:
            found = call(client, **given | {"job": ONLY_JOB})
            with pytest.raises(NotFound):
                await (anext(found) if hasattr(found, "__anext__") else found)
        known = [each for each in of_master if compile_path(each)[0].match(asked[-1])]
        assert known, f"{method} {asked[-1]} is no path of a master"
    assert len(asked) > 20


@pytest.mark.parametrize("name", sorted(documented().keys() - OF_MEMBERS))
def test_a_method_returns_the_record_of_the_document(name: str):
    _, _, operation = documented()[name]
    good = next(answer for status, answer in operation["responses"].items() if status.startswith("2"))
    schema = str(good["content"]["application/json"]["schema"])
    source = inspect.getsource(getattr(AsyncClient, snake(name)))
    assert any(f"schemas/{word}'" in schema for word in re.findall(r"\b[A-Z]\w+", source)), (schema, source)


def test_the_synchronous_client_is_the_asynchronous_one_without_awaits():
    assert DERIVED.read_text() == derived(), "run `make clients`"


async def remove_nothing(_: JobSpec) -> None:
    pass


def test_a_job_is_submitted_shown_paused_cancelled_and_deleted():
    async def main() -> None:
        jobs = Jobs(tasks=12)
        async with jobs.leading(remove_files=remove_nothing) as leader, client_of(leader) as client:
            created = await client.create_job(new_job("a"), key="once")
            assert (created.standing, created.source_digest) == (Standing.QUEUED, SOURCE_OF_JOB.digest)
            assert (await client.create_job(new_job("a"), key="once")).create_time == created.create_time
            with pytest.raises(Conflict):
                await client.create_job(new_job("a"), key="another")
            assert (await client.get_job_source("a")).text == SOURCE_OF_JOB.text
            async with jobs.pool(2, 1):
                running = await client.wait_for_job(
                    "a", lambda job: job.standing == "ACTIVE" and job.state == "RUNNING"
                )
                assert running.progress.records_total > 0
                states = [task.state async for task in client.list_tasks("a", page_size=5)]
                assert len(states) == (await client.get_task_summary("a")).total == 12
                assert len([member async for member in client.list_members("a")]) == 3
                assert (await client.get_pool()).trainers.members == 2
                asked = await client.pause_job("a")
                assert (await client.wait_for_operation("a", asked.operation_id)).state == "DONE"
                with pytest.raises(Conflict):
                    await client.get_task_summary("a")
                assert (await client.explain_job("a")).code == "JOB_PAUSED"
                paused = await client.get_job("a")
                assert (paused.state, paused.settings) == ("PAUSED", created.settings)
                assert (await client.resume_job("a", if_match=paused.version)).state == "DONE"
                assert (await client.get_job("a")).wanted == "run"
                with pytest.raises(PreconditionFailed) as refused:
                    await client.cancel_job("a", if_match=paused.version)
                assert refused.value.details["expected"] == [paused.version]
                assert (await client.cancel_job("a", wait_s=10)).state == "DONE"
                assert (await client.wait_for_job("a")).standing == "CANCELLED"
                with pytest.raises(Conflict, match="not as it was waited for"):
                    await client.wait_for_job("a", lambda job: job.standing == "PAUSED")
            [listed] = [job async for job in client.list_jobs(state=Standing.CANCELLED)]
            assert (listed.job, listed.state, listed.settings) == ("a", "CANCELLED", None)
            assert (await client.delete_job("a", wait_s=10)).state == "DONE"

    run_virtually(main)


def test_events_are_followed_without_a_gap_until_the_job_has_ended():
    async def main() -> None:
        jobs = Jobs(tasks=6)
        async with jobs.leading() as leader, client_of(leader) as client, jobs.pool(2, 1):
            await client.create_job(new_job("a"))
            await until(lambda: leader.state.job("a").standing is Standing.ACTIVE, "the job to start")
            seen = [event async for event in client.follow_events("a")]
            numbers = [event.event_id for event in seen]
            assert len(numbers) > 3
            assert numbers == sorted(set(numbers))
            assert (await client.get_job("a")).standing == "COMPLETED"

    run_virtually(main)


def test_who_follows_events_too_slowly_is_told_how_many_are_lost_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept, "KEPT_EVENTS", 1)

    async def main() -> None:
        jobs, gaps = Jobs(tasks=6), []
        async with jobs.leading() as leader, client_of(leader) as client:
            async with jobs.pool(2, 1):
                await client.create_job(new_job("a"))
                await until(lambda: leader.state.job("a").standing is Standing.ACTIVE, "the job to start")
                followed = client.follow_events("a", on_gap=gaps.append)
                unwarned = client.follow_events("a")
                seen = [(await anext(followed)).event_id]
                assert (await anext(unwarned)).event_id == seen[0]
                await until(lambda: leader.state.job("a").standing is Standing.COMPLETED, "the job's end")
            seen += [event.event_id async for event in followed]
            [gap] = gaps
            assert gap.lost > 0
            lost = set(range(gap.after + 1, gap.resume_after + 1))
            assert (gap.lost, lost & set(seen)) == (len(lost), set())
            assert sorted(lost | set(seen)) == list(range(seen[0], seen[-1] + 1))
            with pytest.raises(
                CursorExpired, match=f"{gap.lost} events after {gap.after} were forgotten"
            ) as raised:
                [event async for event in unwarned]
            rest = [
                event.event_id
                async for event in client.follow_events("a", after=raised.value.details["resume_after"])
            ]
            assert rest == seen[-len(rest) :] == list(range(gap.resume_after + 1, seen[-1] + 1))
            assert [
                event.event_id async for event in client.follow_events("a", after=7, on_gap=gaps.append)
            ] == rest
            with pytest.raises(CursorExpired, match="events were forgotten"):
                [event async for event in client.follow_events("a", after=10**12)]

    run_virtually(main)


class Leader(httpx.AsyncBaseTransport):
    """Whoever leads now; while nobody does, connections are refused."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.asked: set[str] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        leader = self.jobs.leader
        if leader is None:
            raise httpx.ConnectError("nobody leads", request=request)
        self.asked.add(leader.name)
        return await httpx.ASGITransport(make_app(leader)).handle_async_request(request)


def test_who_follows_events_misses_none_and_sees_none_twice_when_another_master_takes_over():
    async def main() -> None:
        jobs = Jobs(tasks=40)
        leaders = Leader(jobs)
        async with AsyncClient("http://master", token="", transport=leaders) as client, jobs.pool(2, 1):
            async with jobs.leading("m1") as first:
                await client.create_job(new_job("a"))
                await until(lambda: first.state.job("a").standing is Standing.ACTIVE, "the job to start")
                followed = asyncio.ensure_future(ids_of_events(client))
                await until(lambda: len(jobs.taken) > 3, "some tasks")
            await asyncio.sleep(3)
            async with jobs.leading("m2"):
                seen = await followed
                page = await client.list_events("a", page_size=1000)
                assert (len(leaders.asked), len(seen) > 5) == (2, True)
                assert seen == [event.event_id for event in page.events]

    run_virtually(main)


async def ids_of_events(client: AsyncClient) -> list[int]:
    return [event.event_id async for event in client.follow_events("a")]


def test_names_cannot_become_other_paths():
    async def main() -> None:
        async with Jobs().leading() as leader, client_of(leader) as client:
            for name in ("../pool", "a/../../pool", "a?state=x", "a#b"):
                with pytest.raises((NotFound, InvalidArgument)):
                    await client.get_job(name)
            for name in ("", ".", ".."):
                with pytest.raises(InvalidArgument):
                    await client.get_job(name)

    run_virtually(main)

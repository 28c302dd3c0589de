"""Lists in pages: what is there all the time is shown once, in order, whatever is deleted or comes between
two pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from master_service.api.app import make_api, make_app
from master_service.api.openapi.document import operations
from master_service.api.render import page_of, token_of
from master_service.api.routes.logs import LogSource
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.api.client import check_problem, client_of
from tests.master_service.api.test_cluster_rest import removed, wanted
from tests.master_service.cluster import MasterCluster, running, spec_of
from tests.master_service.many_jobs import Jobs
from trireme_shared.protocol.errors import InvalidArgument

KEYS = st.tuples(st.integers(0, 3), st.text("ab\N{GREEK SMALL LETTER ALPHA}\udc80", max_size=2))


@given(
    st.sets(KEYS, max_size=8),
    st.lists(st.sets(KEYS, max_size=4), max_size=6),
    st.integers(1, 3),
    st.booleans(),
)
def test_what_stays_is_shown_once_and_in_order(
    begun: set[Any], changes: list[set[Any]], page_size: int, newest_first: bool
) -> None:
    """`changes`: between two pages, what is there goes and what is not there comes."""
    there, always, shown, token = set(begun), set(begun), [], ""
    for change in [*changes, *[set()] * 40]:
        page, token = page_of(there, lambda key: key, page_size, token, newest_first=newest_first)
        assert len(page) <= page_size
        assert re.fullmatch(r"[A-Za-z0-9_-]*", token)
        shown += page
        if not token:
            break
        there ^= change
        always &= there
    assert shown == sorted(set(shown), reverse=newest_first)
    assert always <= set(shown)


TOKENS = [token_of("a"), token_of(1, "a"), "x", "eyJhIjoxfQ", "W1tdXQ", "Wy" * 1500]  # also {"a":1}, [[]]


@pytest.mark.parametrize("token", TOKENS)
def test_a_token_of_another_list_is_refused(token: str) -> None:
    with pytest.raises(InvalidArgument, match="was not given by this list"):
        page_of([(1, 2)], lambda key: key, 1, token)


async def pages(client: httpx.AsyncClient, path: str, name: str, delete: Any) -> list[dict[str, Any]]:
    """All items, two a page; after each page but the last `delete(page)` is awaited."""
    found, token = [], ""
    while True:
        answer = await client.get(path, params={"page_size": 2, "page_token": token})
        assert answer.status_code == 200, answer.text
        found += answer.json()[name]
        if not (token := answer.json()["next_page_token"]):
            return found
        await delete(answer.json()[name])


def test_jobs_and_schedules_that_are_deleted_take_no_others_out_of_later_pages() -> None:
    """By offset, of 5 jobs the third was left out once the first two were deleted."""

    async def main() -> None:
        names = ["a", "b", "c", "d", "e"]
        async with Jobs().leading(remove_files=removed([])) as leader, client_of(leader) as client:
            for name in names:
                assert (await client.post("/v1/jobs", json=wanted(name))).status_code == 201
                await client.post(f"/v1/jobs/{name}/cancel")
                schedule = wanted(name, cron="30 2 * * *")
                assert (await client.post("/v1/schedules", json=schedule)).status_code == 201

            async def delete_jobs(page: list[dict[str, Any]]) -> None:
                for each in page:
                    assert (await client.delete(f"/v1/jobs/{each['job']}")).is_success
                await until(
                    lambda: not {each["job"] for each in page} & leader.state.jobs.keys(), "the deletion"
                )

            async def delete_schedules(page: list[dict[str, Any]]) -> None:
                for each in page:
                    assert (await client.delete(f"/v1/schedules/{each['name']}")).is_success

            jobs = await pages(client, "/v1/jobs", "jobs", delete_jobs)
            assert [each["job"] for each in jobs] == names
            schedules = await pages(client, "/v1/schedules", "schedules", delete_schedules)
            assert [each["name"] for each in schedules] == names

    run_virtually(main)


def test_members_that_leave_the_pool_take_no_others_out() -> None:
    async def main() -> None:
        jobs = Jobs()
        async with jobs.leading() as leader, jobs.pool(4, 1), client_of(leader) as client:
            await until(lambda: len(leader.state.members) == 5, "the pool")

            async def leave(page: list[dict[str, Any]]) -> None:
                for each in page:
                    await jobs.etcd.delete(jobs.keys.member(each["kind"], each["member_id"]))
                gone = {each["member_id"] for each in page}
                await until(lambda: not gone & {name for _, name in leader.state.members}, "them to be gone")

            members = await pages(client, "/v1/pool-members", "members", leave)
            assert [each["member_id"] for each in members] == ["p0", "t0", "t1", "t2", "t3"]

    run_virtually(main)


async def test_logs_that_are_deleted_take_no_others_out(tmp_path: Path) -> None:
    names = [f"trainer-{number}" for number in range(5)]
    for name in names:
        (tmp_path / f"{name}.log").write_text("begun\n")
    async with running(MasterCluster(spec_of()), "t1") as master:
        transport = httpx.ASGITransport(make_app(master, None, LogSource((str(tmp_path),))))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:

            async def delete(page: list[dict[str, Any]]) -> None:
                for each in page:
                    (tmp_path / f"{each['log']}.log").unlink()

            logs = await pages(client, "/v1/logs", "logs", delete)
            assert [each["log"] for each in logs] == names


def test_no_list_fails_at_a_token_of_another_one() -> None:
    async def main() -> None:
        jobs = Jobs()
        async with jobs.leading() as leader, jobs.pool(2, 1), client_of(leader) as client:
            await client.post("/v1/jobs", json=wanted("a"))
            await until(
                lambda: leader.term.jobs and leader.find("a").current_term is not None, "the job to be led"
            )
            asked = 0
            for method, path, operation in operations(make_api(leader).openapi()):
                if "page_token" not in {each["name"] for each in operation.get("parameters", ())}:
                    continue
                for token in (token_of(1), token_of("a"), token_of(1, "a"), token_of("a", 1), token_of()):
                    query = {"page_token": token, "page_size": 100}
                    answer = await client.request(method, path.replace("{job}", "a"), params=query)
                    assert answer.status_code in (200, 400, 404), (path, answer.text)
                    if answer.status_code == 400:
                        check_problem(answer, 400, "INVALID_ARGUMENT")
                asked += 1
            assert asked > 9

    run_virtually(main)

"""A page at a standby: its requests are answered by the leader, with the leader's checks, and only if it asks
for that."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from master_service.api import middleware
from master_service.api.app import make_app
from master_service.api.middleware import MAX_BODY_BYTES
from master_service.api.server import Server
from master_service.leadership.master import Master
from tests.equipment.replaced import replaced
from tests.equipment.tokens import access_by_role
from tests.equipment.uvicorn_server import served
from tests.equipment.waiting import until
from tests.master_service.api.client import check_problem
from tests.master_service.cluster import MasterCluster, leading, spec_of
from trireme_shared.platform.security.tokens import Role
from trireme_shared.protocol.errors import NotLeader
from trireme_shared.protocol.records import Mode

FORWARD = {"Trireme-Forward": "leader"}
LIMIT_S = 30.0


def leader_known_to(standby: Master) -> str:
    with pytest.raises(NotLeader) as refused:
        standby.check_leading()
    return str(refused.value.details["leader"])


@asynccontextmanager
async def standing_by(tmp_path: Path) -> AsyncIterator[tuple[str, str]]:
    """The addresses of a leader and of its standby."""
    cluster, access = (
        MasterCluster(spec_of(mode=Mode.SYNC)),
        access_by_role(tmp_path / "tokens", ["127.0.0.1"]),
    )
    listener, stopping = socket.create_server(("127.0.0.1", 0)), asyncio.Event()
    leader = cluster.master("m1")
    leader.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with leading(leader), served(Server(make_app(leader, access)), listener):
        await cluster.initialise("t1")
        await until(lambda: leader.job.trainers.names, "the job to run", LIMIT_S)
        standby = cluster.master("m2")
        running = asyncio.ensure_future(standby.run(stopping))
        await until(lambda: leader_known_to(standby) == leader.url, "the standby to know its leader", LIMIT_S)
        async with served(Server(make_app(standby, access))) as port:
            yield leader.url, f"http://127.0.0.1:{port}"
        stopping.set()
        await running


def client(url: str, role: Role | str = Role.ADMIN, **headers: str) -> httpx.AsyncClient:
    shown = {"Authorization": f"Bearer {role}"} if role else {}
    return httpx.AsyncClient(base_url=url, headers={**shown, **headers}, trust_env=False, timeout=LIMIT_S)


async def test_a_standby_passes_on_what_asks_for_it_and_nothing_else(tmp_path: Path) -> None:
    async with standing_by(tmp_path) as (leader, standby):
        async with client(standby) as plain:
            check_problem(await plain.get("/v1/job"), 503, "NOT_LEADER")
            assert (await plain.get("/", headers=FORWARD)).headers["content-type"].startswith("text/html")
            assert (await plain.get("/v1/access", headers=FORWARD)).json() == {"role": "admin"}
        async with client(leader) as direct, client(standby, **FORWARD) as through:
            for path in (
                "/v1/job",
                "/v1/jobs/j/events?after=0",
                "/v1/jobs/j/tasks?page_size=3",
                "/v1/unknown",
                "/v1/job?x=1",
            ):
                (asked, given) = await asyncio.gather(direct.get(path), through.get(path))
                assert given.status_code == asked.status_code, path
                same = {"content-type", "etag", "retry-after", "cache-control"}
                assert {k: v for k, v in given.headers.items() if k in same - {"etag"}} == {
                    k: v for k, v in asked.headers.items() if k in same - {"etag"}
                }
                assert given.json().keys() == asked.json().keys()
                assert len(given.headers.get_list("x-request-id")) == 1
            kept = {"Idempotency-Key": "the-same"}
            made = [
                await each.post("/v1/jobs/j/checkpoints", json={}, headers=kept) for each in (direct, through)
            ]
            assert made[0].json()["operation_id"] == made[1].json()["operation_id"], "the key went with it"
            tag = (await through.get("/v1/job")).headers["etag"]
            assert (await through.get("/v1/job", headers={"If-None-Match": tag})).status_code in (200, 304)
            code = (await through.post("/v1/login-codes")).json()["code"]
        async with client(leader, code) as direct, client(standby, code, **FORWARD) as page:
            check_problem(await direct.post("/v1/logins"), 401, "UNAUTHENTICATED")  # the standby has made it
            assert (await page.post("/v1/logins")).json() == {"token": "admin"}


async def test_a_stream_comes_through_piece_by_piece(tmp_path: Path) -> None:
    async with (
        standing_by(tmp_path) as (_, standby),
        client(standby, **FORWARD) as through,
        through.stream("GET", "/v1/jobs/j/events/stream") as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        async with asyncio.timeout(LIMIT_S):
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    break


async def test_both_masters_check_who_asks(tmp_path: Path) -> None:
    async with standing_by(tmp_path) as (_, standby):
        for role, status, code in (
            ("", 401, "UNAUTHENTICATED"),
            ("wrong", 401, "UNAUTHENTICATED"),
            (Role.VIEWER, 403, "PERMISSION_DENIED"),
        ):
            async with client(standby, role, **FORWARD) as through:
                check_problem(await through.post("/v1/jobs/j/checkpoints", json={}), status, code)
        async with client(standby, **FORWARD) as through:
            foreign = await through.get("/v1/job", headers={"Origin": "http://evil.example"})
            check_problem(foreign, 403, "ORIGIN_NOT_ALLOWED")
            check_problem(
                await through.get("/v1/job", headers={"Host": "evil.example"}), 421, "HOST_NOT_ALLOWED"
            )
            own = await through.get("/v1/job", headers={"Origin": standby})
            assert own.status_code == 200, "the page's own origin, which is not the leader's"
            huge = await through.post(
                "/v1/jobs/j/checkpoints",
                content=b" " * (MAX_BODY_BYTES + 1),
                headers={"Content-Type": "application/json"},
            )
            check_problem(huge, 413, "TOO_LARGE")


async def test_without_a_leader_that_answers_it_is_as_without_the_header(tmp_path: Path) -> None:
    """Also when as many as may be are passed on: the process keeps little for them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    cluster, stopping = MasterCluster(spec_of()), asyncio.Event()
    leader = cluster.master("m1")
    leader.url = f"http://127.0.0.1:{free}"
    async with leading(leader):
        standby = cluster.master("m2")
        running = asyncio.ensure_future(standby.run(stopping))
        await until(lambda: leader_known_to(standby) == leader.url, "the standby to know its leader", LIMIT_S)
        transport = httpx.ASGITransport(make_app(standby))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers=FORWARD
        ) as asking:
            check_problem(await asking.get("/v1/job"), 503, "NOT_LEADER")
            with replaced(middleware, "MOST_FORWARDED", 0):  # type: ignore[arg-type]
                check_problem(await asking.post("/v1/jobs/j/checkpoints", json={}), 503, "NOT_LEADER")
        stopping.set()
        await running


async def test_only_that_word_asks_for_it(tmp_path: Path) -> None:
    async with standing_by(tmp_path) as (_, standby), client(standby) as through:
        for header in ("", "1", "Leader", "leader, leader"):
            answer = await through.get("/v1/job", headers={"Trireme-Forward": header})
            check_problem(answer, 503, "NOT_LEADER")

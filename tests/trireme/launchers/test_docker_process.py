"""The launcher of a compose project between masters and an Engine that are played here, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from tests.equipment.docker_engine import DockerEngine, container, refusal, serving
from tests.equipment.waiting import until
from trireme.docker import Settings, project_of, serve
from trireme.launchers import docker_launcher, sizing
from trireme.launchers.docker_engine import Engine
from trireme_shared.platform.security.tokens import Role
from trireme_shared.protocol.errors import InvalidArgument


class Masters:
    """A standby and a leader. Each container that runs is a host with one idle member; jobs need `needed` of
    them."""

    def __init__(self, docker: DockerEngine) -> None:
        self.docker = docker
        self.needed = {"trainer": 0, "pserver": 0}
        self.more: dict[str, Any] = {}
        self.standby = self.leader = ""
        self.asked: set[str] = set()

    def members(self, kind: str) -> list[str]:
        return [
            each["Name"][1:]
            for each in self.docker.containers.values()
            if each["Config"]["Labels"]["com.docker.compose.service"] == kind
            and each["State"]["Status"] == "running"
        ]

    @web.middleware
    async def first(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.asked.add(f"{request.method} {request.path}")
        if request.headers.get("Authorization") != f"Bearer {Role.VIEWER}":
            return web.json_response({"code": "UNAUTHENTICATED", "detail": "no"}, status=401)
        if request.url.port != int(self.leader.rpartition(":")[2]):
            problem = {
                "code": "NOT_LEADER",
                "detail": "a standby",
                "retryable": True,
                "details": {"leader": self.leader},
            }
            return web.json_response(problem, status=503)
        return await handler(request)

    async def pool(self, _: web.Request) -> web.Response:
        counts = {
            f"{kind}s": {
                "members": len(self.members(kind)),
                "idle": 0,
                "draining": 0,
                "needed": needed,
                **self.more,
            }
            for kind, needed in self.needed.items()
        }
        return web.json_response({**counts, **self.more})

    async def pool_members(self, _: web.Request) -> web.Response:
        found = [
            {"member_id": agent, "kind": kind, "host": agent, "agent": agent, "state": "idle", **self.more}
            for kind in self.needed
            for agent in self.members(kind)
        ]
        return web.json_response({"members": found, "next_page_token": ""})


@pytest.fixture
async def masters(docker: DockerEngine) -> AsyncIterator[Masters]:
    found = Masters(docker)
    made = web.Application(middlewares=[found.first])
    made.router.add_get("/v1/pool", found.pool)
    made.router.add_get("/v1/pool-members", found.pool_members)
    runner = web.AppRunner(made, shutdown_timeout=0.1)
    await runner.setup()
    urls = []
    try:
        for _ in range(2):
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            urls.append(f"http://127.0.0.1:{runner.addresses[-1][1]}")
        found.standby, found.leader = urls
        yield found
    finally:
        await runner.cleanup()


@pytest.fixture
async def docker(tmp_path: Path) -> AsyncIterator[DockerEngine]:
    """Its first container is the one where the launcher runs."""
    async with serving(tmp_path / "docker.sock") as engine:
        own = container(9, "launcher")
        own["Name"] = f"/{socket.gethostname()}"
        for each in (own, container(1, "trainer"), container(2, "pserver")):
            engine.add(each)
        yield engine


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, seconds in (
        (sizing, "LOOK_S", 0.05),
        (sizing, "IDLE_S", 0.3),
        (docker_launcher, "LOOK_S", 0.05),
    ):
        monkeypatch.setattr(module, name, seconds)


@pytest.fixture
def settings(docker: DockerEngine, masters: Masters) -> Settings:
    return Settings(
        url=masters.standby, token=Role.VIEWER.value, docker=docker.address, max_trainers=3, max_pservers=1
    )


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[None]:
    stopping = asyncio.Event()
    work = asyncio.ensure_future(serve(settings, stopping))
    try:
        yield
        stopping.set()
        async with asyncio.timeout(30):
            assert await work == 0
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def launched(docker: DockerEngine) -> Callable[[], list[str]]:
    return lambda: [name for name in docker.names() if "-launched-" in name]


async def test_a_resize_starts_and_stops_containers_and_a_launcher_that_starts_again_goes_on(
    docker: DockerEngine, masters: Masters, settings: Settings
) -> None:
    names = launched(docker)
    async with running(settings):
        masters.needed = {"trainer": 3, "pserver": 2}
        await until(lambda: len(names()) == 3, "two trainers and a parameter server more")
    assert names() == ["demo-pserver-launched-0", "demo-trainer-launched-0", "demo-trainer-launched-1"]
    async with running(settings):
        docker.end("demo-trainer-launched-1")  # as `docker kill` by hand
        docker.end("demo_trainer_1")
        await until(lambda: len(masters.members("trainer")) == 3, "others in their place")
        masters.needed = {"trainer": 1, "pserver": 1}
        await until(lambda: len(names()) == 1, "idle ones to be stopped")
    assert names()[0].startswith("demo-trainer-launched-"), "compose's own trainer is away"
    assert {"demo_trainer_1", "demo_pserver_2"} <= set(docker.names()), "containers of compose are compose's"


async def test_it_listens_nowhere_and_a_master_decides_nothing_but_numbers(
    docker: DockerEngine, masters: Masters, settings: Settings
) -> None:
    def listening() -> set[Any]:
        return {each.laddr for each in psutil.Process().net_connections("inet") if each.status == "LISTEN"}

    before, names = listening(), launched(docker)
    masters.needed = {"trainer": 1_000_000, "pserver": 1_000_000}
    masters.more = {
        "image": "evil",
        "Image": "evil",
        "Env": ["X=1"],
        "Binds": ["/:/host"],
        "launcher": "docker",
    }
    async with running(settings):
        await until(lambda: len(names()) == 4, "as many as it may have")
        await asyncio.sleep(0.3)
        assert listening() == before
    assert len(names()) == 4
    for name in names():
        made = docker.named(name)
        assert made["Image"] == container(1, "trainer")["Image"]
        assert made["HostConfig"]["Binds"] == ["demo_secrets:/run/secrets:ro", "demo_data:/data:rw"]
        assert not [line for line in made["Config"]["Env"] if line.startswith("X=")]
    assert masters.asked == {"GET /v1/pool", "GET /v1/pool-members"}


async def test_an_engine_that_fails_for_a_while_is_told_and_asked_again(
    docker: DockerEngine, masters: Masters, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    async def full(request: web.Request) -> web.Response | None:
        return refusal(500, "no space left on device") if request.path.endswith("/create") else None

    docker.before, names = full, launched(docker)
    masters.needed["trainer"] = 3
    async with running(settings):
        await until(lambda: sum(call.endswith("/create") for call in docker.calls) >= 6, "some attempts")
        assert not names()

        async def well(_: web.Request) -> None:
            return None

        docker.before = well
        await until(lambda: len(names()) == 2, "both to be started")
    output = capsys.readouterr()
    assert (output.out + output.err).count("no space left on device") == 1, "told once, not at each attempt"


async def test_a_container_of_no_project_and_none_at_all_say_what_to_set(docker: DockerEngine) -> None:
    alone = container(8, "x")
    alone["Config"]["Labels"] = None
    docker.add(alone)
    async with Engine(docker.address) as engine:
        assert await project_of(engine, socket.gethostname()) == "demo"
        for name in (alone["Id"][:12], "laptop"):
            with pytest.raises(InvalidArgument) as caught:
                await project_of(engine, name)
            assert caught.value.hint == "give the project's name in TRIREME_PROJECT"


async def test_without_a_leader_it_says_so_and_asks_the_given_address_again(
    docker: DockerEngine, masters: Masters, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    # a leader that died; standbys do not know it yet
    leader, masters.leader = masters.leader, "http://127.0.0.1:9"
    names = launched(docker)
    masters.needed["trainer"] = 2
    said = ""

    def says_so() -> bool:
        nonlocal said
        said += "".join(capsys.readouterr())
        return "no_leader" in said

    async with running(settings):
        await until(says_so, "it to say that nobody leads")
        assert not names()
        masters.leader = leader
        await until(names, "one that the new leader asks for")


def test_without_a_url_it_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRIREME_URL", raising=False)
    with pytest.raises(SystemExit) as caught:
        Settings.from_environment()
    assert caught.value.code == 2
    assert "TRIREME_URL" in capsys.readouterr().err

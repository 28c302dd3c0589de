"""An Engine that is away, old, slow, silent, or none."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from tests.equipment.docker_engine import DockerEngine, container, for_ever, id_of, serving
from trireme.launchers import docker_engine
from trireme.launchers.docker_engine import Engine
from trireme_shared.protocol.errors import DeadlineExceeded, InvalidArgument, NotFound, PeerError, TooLarge


@pytest.fixture
async def docker(tmp_path: Path) -> AsyncIterator[DockerEngine]:
    async with serving(tmp_path / "docker.sock") as engine:
        yield engine


@pytest.mark.parametrize(
    "address", ["", "docker.sock", "unix://docker.sock", "http://x:2375", "tcp://x:2375/path", "unix://"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgument, match="is no address of a Docker Engine"):
        Engine(address)


async def test_without_a_socket_it_says_where_it_looked(tmp_path: Path) -> None:
    async with Engine(f"unix://{tmp_path}/none.sock") as engine:
        with pytest.raises(
            PeerError, match=f"there is no socket of a Docker Engine at {tmp_path}/none.sock"
        ) as caught:
            await engine.containers({})
    assert "TRIREME_DOCKER" in caught.value.hint


async def test_a_socket_that_this_user_may_not_open_names_the_group_that_may() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # that of pytest is closed to other users
        path = Path(folder) / "docker.sock"
        Path(folder).chmod(0o755)
        async with serving(path), Engine(f"unix://{path}") as engine:
            path.chmod(0)
            if os.geteuid() == 0:
                os.seteuid(65534)  # root may open every socket
            try:
                with pytest.raises(PeerError, match="may not open the Docker Engine's socket") as caught:
                    await engine.containers({})
            finally:
                os.seteuid(os.getuid())
            assert f"({path.stat().st_gid}; `group_add`" in caught.value.hint


async def test_an_engine_that_has_ended_is_told(tmp_path: Path) -> None:
    path = tmp_path / "left.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    async with Engine(f"unix://{path}") as engine:
        with pytest.raises(PeerError, match="the Docker Engine does not run"):
            await engine.containers({})


async def test_it_speaks_a_version_that_was_tested_or_the_oldest_that_the_engine_takes(
    docker: DockerEngine,
) -> None:
    for theirs, least, used in (("1.40", "1.12", "1.40"), ("1.52", "1.24", "1.41"), ("1.52", "1.44", "1.44")):
        docker.about = {"ApiVersion": theirs, "MinAPIVersion": least}
        async with Engine(docker.address) as engine:
            await engine.containers({})
        assert docker.calls[-1] == f"GET /v{used}/containers/json"


async def test_an_engine_that_is_too_old_is_refused(docker: DockerEngine) -> None:
    docker.about = {"ApiVersion": "1.39", "MinAPIVersion": "1.12"}
    async with Engine(docker.address) as engine:
        with pytest.raises(InvalidArgument, match=r"speaks API 1\.39; 1\.40 or newer is needed"):
            await engine.containers({})


async def test_after_an_update_of_the_engine_the_version_is_asked_for_again(docker: DockerEngine) -> None:
    async with Engine(docker.address) as engine:
        await engine.containers({})
        docker.about = {"ApiVersion": "1.52", "MinAPIVersion": "1.44"}
        with pytest.raises(InvalidArgument, match=r"client version 1\.41 is too old"):
            await engine.containers({})
        assert await engine.containers({}) == []


@pytest.mark.parametrize("call", ["containers", "container", "create", "connect", "start", "stop", "remove"])
async def test_every_call_has_a_limit(
    docker: DockerEngine, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {
        "containers": ({},),
        "create": ("x", {}),
        "connect": ("net", "x", {}),
        "stop": ("x", 0),
    }.get(call, ("x",))
    async with Engine(docker.address) as engine:
        await engine.containers({})  # which version to speak is known then
        for name in ("LOOK_S", "CHANGE_S", "STOP_S"):
            assert getattr(docker_engine, name) <= 60
            monkeypatch.setattr(docker_engine, name, 0.05)
        engine_calls = getattr(engine, call)
        docker.before = for_ever
        async with asyncio.timeout(30):
            with pytest.raises(DeadlineExceeded, match=r"gave no answer to \w+ /.* within"):
                await engine_calls(*arguments)


@pytest.mark.parametrize(
    "answer", ["<html>hello</html>", "{}", "[1]", '[{"Id": "x", "State": "running"}]', "null", ""]
)
async def test_who_answers_and_is_no_engine_is_told(docker: DockerEngine, answer: str) -> None:
    async def other(request: web.Request) -> web.Response | None:
        return None if request.path == "/version" else web.Response(text=answer)

    docker.before = other
    async with Engine(docker.address) as engine:
        for call in (engine.containers({}), engine.container("x"), engine.create("x", {})):
            with pytest.raises(PeerError, match="with something else than a Docker Engine does"):
                await call


async def test_over_tcp_as_over_a_socket(tmp_path: Path) -> None:
    """As a proxy is reached."""
    async with serving(tmp_path / "docker.sock") as docker:
        docker.add(container(1, "trainer"))
        runner = web.AppRunner(docker.application(), shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            port = runner.addresses[0][1]
            async with Engine(f"tcp://127.0.0.1:{port}") as engine:
                assert [each["Id"] for each in await engine.containers({})] == [id_of(1)]
        finally:
            await runner.cleanup()
        async with Engine(f"tcp://127.0.0.1:{port}") as engine:
            with pytest.raises(PeerError, match=f"nothing listens at tcp://127.0.0.1:{port}"):
                await engine.containers({})


async def test_an_answer_without_end_is_not_kept(
    docker: DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_engine, "ANSWER_BYTES", 1 << 20)

    async def long(request: web.Request) -> web.Response | None:
        return None if request.path == "/version" else web.Response(text=" " * (3 << 20))

    docker.before = long
    async with Engine(docker.address) as engine:
        with pytest.raises(TooLarge, match="more than 1 MiB"):
            await engine.containers({})


async def test_a_container_that_is_gone_is_no_error_when_it_is_removed(docker: DockerEngine) -> None:
    docker.add(container(1, "trainer"))
    async with Engine(docker.address) as engine:
        await engine.remove(id_of(1))
        await engine.remove(id_of(1))
        with pytest.raises(NotFound, match="No such container"):
            await engine.container(id_of(1))

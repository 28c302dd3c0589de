"""Containers as those of a compose service, from an Engine that tests/equipment/docker_engine.py plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from tests.equipment.docker_engine import IMAGE, DockerEngine, container, refusal, serving
from trireme.launchers.docker_engine import Engine
from trireme.launchers.docker_launcher import AT_ONCE, DockerLauncher
from trireme.launchers.launcher import Launched
from trireme.view.child_events import ChildEvent
from trireme_shared.protocol.errors import Forbidden, InvalidArgument, NotFound, PeerError


@pytest.fixture
async def docker(tmp_path: Path) -> AsyncIterator[DockerEngine]:
    """With one container of each service of project `demo`, and one of another project."""
    async with serving(tmp_path / "docker.sock") as engine:
        engine.add(container(1, "trainer"))
        engine.add(container(2, "pserver"))
        foreign = container(3, "trainer")
        foreign["Name"] = "/other_trainer_1"
        foreign["Config"]["Labels"] |= {"com.docker.compose.project": "other", "trireme.cluster": "trireme"}
        foreign["Config"]["Labels"] |= {"trireme.role": "trainer", "trireme.id": "other_trainer_1"}
        engine.add(foreign)
        strange = container(7, "something")
        strange["Config"]["Labels"] |= {"trireme.cluster": "trireme", "trireme.id": "of somebody else"}
        strange["State"]["Status"] = "exited"
        engine.add(strange)
        yield engine


@pytest.fixture
def events() -> list[ChildEvent]:
    return []


@pytest.fixture
async def launcher(docker: DockerEngine, events: list[ChildEvent]) -> AsyncIterator[DockerLauncher]:
    async with Engine(docker.address) as engine:
        yield DockerLauncher(engine, "demo", "trireme", events.append)


async def test_a_new_container_has_all_that_the_services_own_has_but_ports_and_name(
    docker: DockerEngine, launcher: DockerLauncher
) -> None:
    assert await launcher.start("trainer", 1) == ["demo-trainer-launched-0"]
    made, source = docker.named("demo-trainer-launched-0"), container(1, "trainer")
    assert made["State"]["Status"] == "running"
    assert made["Image"] == IMAGE
    assert made["Config"]["Hostname"] == made["Id"][:12] != source["Config"]["Hostname"]
    for key in ("User", "Cmd", "Volumes", "StopTimeout"):
        assert made["Config"][key] == source["Config"][key], key
    assert made["Config"]["Env"] == [
        "PATH=/bin",
        "TRIREME_ETCD=http://etcd:2379",
        "TRIREME_NAME=demo-trainer-launched-0",
        "TRIREME_TRAINERS=1",
        "TRIREME_PSERVERS=0",
    ]
    limits = (
        "Memory",
        "PidsLimit",
        "CapDrop",
        "SecurityOpt",
        "ReadonlyRootfs",
        "Tmpfs",
        "Init",
        "NetworkMode",
    )
    assert {key: made["HostConfig"][key] for key in limits} == {
        key: source["HostConfig"][key] for key in limits
    }
    assert made["HostConfig"]["Binds"] == ["demo_secrets:/run/secrets:ro", "demo_data:/data:rw"]
    assert made["HostConfig"]["Mounts"] == [
        {"Type": "volume", "Source": "", "Target": "/var/lib/trireme"},
        {"Type": "bind", "Source": "/srv/data", "Target": "/datasets", "ReadOnly": True},
    ], "a volume without a name is another container's own"
    assert "PortBindings" not in made["HostConfig"]
    assert made["HostConfig"]["RestartPolicy"] == {"Name": "unless-stopped"}
    assert made["NetworkSettings"]["Networks"] == {
        "demo_default": {"Aliases": ["trainer"]},
        "demo_etcd": {"Aliases": ["trainer"]},
    }


async def test_compose_sees_a_one_off_container_of_the_project_that_down_takes_away(
    docker: DockerEngine, launcher: DockerLauncher
) -> None:
    await launcher.start("pserver", 1)
    labels = docker.named("demo-pserver-launched-0")["Config"]["Labels"]
    assert labels["com.docker.compose.project"] == "demo"
    assert labels["com.docker.compose.service"] == "pserver"
    assert labels["com.docker.compose.oneoff"] == "True"


async def test_a_service_in_the_hosts_network_or_without_a_limit_of_its_stop_is_copied_too(
    docker: DockerEngine, launcher: DockerLauncher
) -> None:
    source = container(4, "trainer", StopTimeout=None)
    source["HostConfig"]["NetworkMode"] = "host"
    source["NetworkSettings"]["Networks"] = {"host": {"Aliases": None}}
    docker.add(source)
    await launcher.start("trainer", 1)
    made = docker.named("demo-trainer-launched-0")
    assert made["NetworkSettings"]["Networks"] == {}
    assert made["Config"]["StopTimeout"] == 60, "the Engine's 10 s are too short to save and leave"


async def test_stop_gives_the_services_grace_removes_the_container_and_touches_no_others(
    docker: DockerEngine, launcher: DockerLauncher
) -> None:
    graces: list[str] = []

    async def note(request: web.Request) -> None:
        if request.path.endswith("/stop"):
            graces.append(request.query["t"])

    docker.before = note
    before = docker.names()
    names = await launcher.start("trainer", 3)
    await launcher.stop([names[1], "demo_trainer_1", "never started"])
    assert graces == ["70"]
    assert [each.id for each in launcher.list()] == [names[0], names[2]]
    await launcher.stop(names)
    assert launcher.list() == []
    assert docker.names() == before


async def test_a_launcher_that_starts_again_finds_its_containers_and_no_others(
    docker: DockerEngine, launcher: DockerLauncher
) -> None:
    await launcher.start("trainer", 2)
    await launcher.start("pserver", 1)
    async with Engine(docker.address) as engine:
        again = DockerLauncher(engine, "demo", "trireme", lambda _: None)
        await again.look()
        assert sorted(again.list(), key=lambda each: each.id) == [
            Launched("demo-pserver-launched-0", "pserver"),
            Launched("demo-trainer-launched-0", "trainer"),
            Launched("demo-trainer-launched-1", "trainer"),
        ]
        other = DockerLauncher(engine, "demo", "another-cluster", lambda _: None)
        await other.look()
        assert other.list() == []
        await again.start("trainer", 1)
        assert "demo-trainer-launched-2" in docker.names()


async def test_what_the_engine_does_not_run_any_more_is_removed_and_told(
    docker: DockerEngine, launcher: DockerLauncher, events: list[ChildEvent]
) -> None:
    names = list(await launcher.start("trainer", 3))
    docker.end(names[0])
    docker.named(names[1])["State"]["Status"] = "created"  # the launcher before died between two calls
    del docker.containers[docker.named(names[2])["Id"]]
    await launcher.start("trainer", 1)
    await launcher.look()
    assert [each.id for each in launcher.list()] == ["demo-trainer-launched-3"]
    told = {event.child: event.cause for event in events}
    assert told[names[0]] == "Exited (137) 1 second ago: removed"
    assert told[names[2]] == "somebody has removed it"
    assert not {names[0], names[1]} & set(docker.names())


async def test_a_list_that_is_older_than_a_start_does_not_forget_what_was_started(
    docker: DockerEngine, launcher: DockerLauncher
) -> None:
    read = asyncio.Event()

    async def late(request: web.Request) -> web.Response | None:
        if not request.path.endswith("/containers/json") or read.is_set():
            return None
        answer = await docker.list_containers(request)
        read.set()
        await asyncio.sleep(0.2)
        return answer

    docker.before = late
    looking = asyncio.ensure_future(launcher.look())
    await read.wait()
    names = await launcher.start("trainer", 1)
    await looking
    assert [each.id for each in launcher.list()] == names


async def test_a_container_that_the_engine_starts_again_and_again_stays_and_is_told_once(
    docker: DockerEngine, launcher: DockerLauncher, events: list[ChildEvent]
) -> None:
    (name,) = await launcher.start("trainer", 1)
    docker.named(name)["State"]["Status"] = "restarting"
    await launcher.look()
    await launcher.look()
    assert [each.id for each in launcher.list()] == [name]
    assert [event.child for event in events] == [name]


async def test_names_that_others_have_are_passed_over(docker: DockerEngine, launcher: DockerLauncher) -> None:
    foreign = container(5, "something")
    foreign["Name"] = "/demo-trainer-launched-0"
    docker.add(foreign)
    assert sorted(await launcher.start("trainer", 2)) == [
        "demo-trainer-launched-1",
        "demo-trainer-launched-2",
    ]
    assert docker.named("demo-trainer-launched-0") == foreign


async def test_a_copy_of_a_copy_serves_while_compose_has_none(
    docker: DockerEngine, launcher: DockerLauncher
) -> None:
    await launcher.start("trainer", 1)
    del docker.containers[docker.named("demo_trainer_1")["Id"]]
    run = container(1_000_000, "trainer", Cmd=["bash"])  # of `docker compose run trainer bash`
    run["Config"]["Labels"]["com.docker.compose.oneoff"] = "True"
    docker.add(run)
    await launcher.start("trainer", 1)
    assert docker.named("demo-trainer-launched-1")["Config"]["Cmd"] == ["host"]


async def test_without_a_container_to_copy_it_says_how_to_get_one(
    docker: DockerEngine, launcher: DockerLauncher
) -> None:
    del docker.containers[docker.named("demo_trainer_1")["Id"]]
    with pytest.raises(NotFound, match="project demo has no container of service trainer to copy") as caught:
        await launcher.start("trainer", 1)
    assert caught.value.hint == "let compose create one: docker compose up --scale trainer=1"


async def test_an_image_that_is_gone_is_told_and_leaves_nothing(
    docker: DockerEngine, launcher: DockerLauncher
) -> None:
    before = docker.names()
    docker.images.clear()
    with pytest.raises(NotFound, match="No such image: sha256:111"):
        await launcher.start("trainer", 50)
    assert (docker.names(), launcher.list()) == (before, [])
    assert sum(call.endswith("/create") for call in docker.calls) == 1, "what stops one stops all"


@pytest.mark.parametrize("network", ["demo_default", "demo_etcd"])
async def test_a_network_that_is_gone_is_told_and_leaves_nothing(
    docker: DockerEngine, launcher: DockerLauncher, network: str
) -> None:
    before = docker.names()
    docker.networks.remove(network)
    with pytest.raises(NotFound, match=f"network {network} not found"):
        await launcher.start("trainer", 2)
    assert (docker.names(), launcher.list()) == (before, [])


async def test_what_could_be_started_stays_when_the_rest_could_not(
    docker: DockerEngine, launcher: DockerLauncher
) -> None:
    async def full(request: web.Request) -> web.Response | None:
        created = sum(call.endswith("/create") for call in docker.calls)
        full = request.path.endswith("/create") and created > AT_ONCE + 2
        return refusal(500, "no space left on device") if full else None

    docker.before = full
    with pytest.raises(PeerError, match="no space left on device"):
        await launcher.start("trainer", AT_ONCE + 4)
    assert len(launcher.list()) == AT_ONCE + 2


async def test_masters_are_scaled_by_compose_alone(launcher: DockerLauncher) -> None:
    with pytest.raises(InvalidArgument, match="master"):
        await launcher.start("master", 1)


async def test_only_the_calls_that_a_proxy_has_to_let_through_are_made(
    docker: DockerEngine, launcher: DockerLauncher
) -> None:
    """As docs/cluster.md lists them."""
    page = (Path(__file__).parents[3] / "docs" / "cluster.md").read_text(encoding="utf-8")
    allowed = {
        line.strip()
        for line in page.splitlines()
        if line.startswith(("    GET /", "    POST /", "    DELETE /"))
    }
    await launcher.start("trainer", 1)
    await launcher.look()
    await launcher.stop([each.id for each in launcher.list()])
    made = set()
    for call in docker.calls:
        method, _, path = call.partition(" ")
        parts = [
            "{id}" if len(part) == 64 else part for part in path.split("/") if not part.startswith("v1.")
        ]
        if parts[1] == "networks":
            parts[2] = "{name}"
        made.add(f"{method} {'/'.join(parts)}")
    assert made == allowed


async def test_a_proxy_that_refuses_a_call_is_told(docker: DockerEngine, launcher: DockerLauncher) -> None:
    async def refuse(request: web.Request) -> web.Response | None:
        return web.Response(status=403, text="<html>Forbidden</html>") if request.method == "POST" else None

    docker.before = refuse
    with pytest.raises(Forbidden, match=r"refused POST /v1\.41/containers/create: <html>Forbidden") as caught:
        await launcher.start("trainer", 1)
    assert "docs/cluster.md" in caught.value.hint

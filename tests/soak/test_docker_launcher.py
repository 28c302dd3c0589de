"""The launcher of containers against a real Docker Engine: `pytest -m soak
tests/soak/test_docker_launcher.py`.

DOCKER_HOST names the Engine as for `docker`; TRIREME_TEST_IMAGE an image with `sh` that is there already
(default: the newest one). Everything has a name of its own, and is removed at the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.equipment.waiting import until
from trireme.launchers.docker_engine import DEFAULT, Engine
from trireme.launchers.docker_launcher import DockerLauncher
from trireme.view.child_events import ChildEvent
from trireme_shared.platform.runtime import ids

ADDRESS = os.environ.get("DOCKER_HOST", DEFAULT)
# a service that says when it is asked to leave, and takes a second for it
SCRIPT = (
    "trap 'echo $TRIREME_NAME >> /data/left; sleep 1; exit 0' TERM; while [ ! -e /tmp/die ]; do sleep "
    "0.1; done; exit 3"
)
LIMITS = (
    "Memory",
    "PidsLimit",
    "NanoCpus",
    "CapDrop",
    "SecurityOpt",
    "ReadonlyRootfs",
    "Tmpfs",
    "Init",
    "NetworkMode",
)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def inspect(name: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = json.loads(docker("inspect", name))
    return found[0]


@pytest.fixture
def image() -> str:
    try:
        found = docker("images", "--format", "{{.ID}}").split()
    except (OSError, AssertionError) as error:
        pytest.skip(f"no Docker Engine at {ADDRESS}: {error}")
    given = os.environ.get("TRIREME_TEST_IMAGE")
    if not (given or found):
        pytest.skip("the Docker Engine has no image; name one in TRIREME_TEST_IMAGE")
    return given or found[0]


@pytest.fixture
def project(image: str) -> Iterator[str]:
    """A container of service `trainer`, as compose makes it."""
    name = ids.new_id("launch")
    mine = ["--label", f"com.docker.compose.project={name}"]
    try:
        docker("network", "create", *mine, f"{name}_default")
        docker("network", "create", "--internal", *mine, f"{name}_etcd")
        docker("volume", "create", *mine, f"{name}_data")
        docker(
            *(
                "create",
                "--name",
                f"{name}_trainer_1",
                "--network",
                f"{name}_default",
                "--network-alias",
                "trainer",
            ),
            *mine,
            *("--label", "com.docker.compose.service=trainer", "--label", "com.docker.compose.oneoff=False"),
            *(
                "--init",
                "--read-only",
                "--cap-drop",
                "ALL",
                "--security-opt",
                "no-new-privileges",
                "--user",
                "0",
            ),
            *("--memory", "64m", "--pids-limit", "50", "--cpus", "0.5", "--tmpfs", "/tmp:size=1m"),
            *("--volume", f"{name}_data:/data", "--volume", "/scratch", "--stop-timeout", "20"),
            *("--publish", "127.0.0.1::8470", "--restart", "on-failure:3", "--env", "TRIREME_TRAINERS=1"),
            *("--health-cmd", "true", "--health-interval", "1s", "--entrypoint", "sh", image, "-c", SCRIPT),
        )
        docker("network", "connect", "--alias", "trainer", f"{name}_etcd", f"{name}_trainer_1")
        docker("start", f"{name}_trainer_1")
        yield name
        assert (
            docker(
                "ps",
                "-aq",
                "--filter",
                f"label=com.docker.compose.project={name}",
                "--filter",
                "label=trireme.id",
            )
            == ""
        )
    finally:
        label = f"label=com.docker.compose.project={name}"
        if left := docker("ps", "-aq", "--filter", label).split():
            docker("rm", "--force", "--volumes", *left)
        for kind in ("network", "volume"):
            if left := docker(kind, "ls", "-q", "--filter", label).split():
                docker(kind, "rm", *left)


async def test_containers_are_copied_started_again_found_again_stopped_and_removed(project: str) -> None:
    events: list[ChildEvent] = []
    async with Engine(ADDRESS) as engine:
        launcher = DockerLauncher(engine, project, "trireme", events.append)
        began = time.monotonic()
        names = list(await launcher.start("trainer", 3))
        print(f"\n3 containers started in {time.monotonic() - began:.2f} s")  # noqa: T201
        source = inspect(f"{project}_trainer_1")
        unnamed = []
        for name in names:
            made = inspect(name)
            assert made["State"]["Running"]
            assert {key: made["HostConfig"][key] for key in LIMITS} == {
                key: source["HostConfig"][key] for key in LIMITS
            }
            for key in ("User", "Cmd", "Entrypoint", "Healthcheck", "StopTimeout"):
                assert made["Config"].get(key) == source["Config"].get(key), key
            assert f"TRIREME_NAME={name}" in made["Config"]["Env"]
            assert made["NetworkSettings"]["Networks"].keys() == source["NetworkSettings"]["Networks"].keys()
            assert not made["HostConfig"]["PortBindings"]
            volumes = {
                each["Destination"]: each["Name"] for each in made["Mounts"] if each["Type"] == "volume"
            }
            theirs = {
                each["Destination"]: each["Name"] for each in source["Mounts"] if each["Type"] == "volume"
            }
            assert volumes["/data"] == theirs["/data"]
            assert volumes["/scratch"] != theirs["/scratch"]
            unnamed.append(volumes["/scratch"])
        docker("exec", names[0], "touch", "/tmp/die")
        await until(lambda: inspect(names[0])["RestartCount"] >= 1, "the Engine to start it again", 60)
        docker("kill", names[1])  # by hand: the Engine leaves it
        await launcher.look()
        assert [each.id for each in launcher.list()] == [names[0], names[2]]
        assert "Exited (137)" in next(event.cause for event in events if event.child == names[1])
        again = DockerLauncher(engine, project, "trireme", events.append)
        await again.look()
        assert [each.id for each in again.list()] == [names[0], names[2]]
        await again.stop(names)
        left = docker("exec", f"{project}_trainer_1", "cat", "/data/left").split()
        assert {names[0], names[2]} <= set(left), "SIGTERM did not reach them, or their grace was too short"
        assert again.list() == []
        assert not set(unnamed) & set(docker("volume", "ls", "-q").split())


async def test_errors_of_the_engine_are_told_and_leave_nothing(project: str) -> None:
    async with Engine(ADDRESS) as engine:
        source = await engine.container(f"{project}_trainer_1")
        with pytest.raises(Exception, match=r"network .* not found") as caught:
            await engine.connect(f"{project}_gone", source["Id"], {})
        print(f"\n{caught.value}")  # noqa: T201
        with pytest.raises(Exception, match="No such container") as caught:
            await engine.container("nobody")
        print(caught.value)  # noqa: T201
        with pytest.raises(Exception, match="is already in use") as caught:
            await engine.create(f"{project}_trainer_1", {"Image": source["Image"], "Cmd": ["true"]})
        print(caught.value)  # noqa: T201
        with pytest.raises(Exception, match="No such image") as caught:
            await engine.create(f"{project}_x", {"Image": "sha256:" + "0" * 64, "Cmd": ["true"]})
        print(caught.value)  # noqa: T201


COMPOSE = """
services:
  trainer:
    image: {image}
    entrypoint: [sh, -c, 'trap "exit 0" TERM; while :; do sleep 0.1; done']
    volumes: ["data:/data", "/scratch"]
    stop_grace_period: 20s
volumes:
  data:
"""


async def test_compose_leaves_them_at_up_and_removes_them_at_down(image: str, tmp_path: Path) -> None:
    program = next(
        (each for each in (["docker", "compose"], ["docker-compose"]) if compose(each, "version")), None
    )
    if program is None:
        pytest.skip("neither `docker compose` nor `docker-compose` is there")
    project = ids.new_id("launch")
    file = tmp_path / "docker-compose.yml"
    file.write_text(COMPOSE.replace("{image}", image))
    program = [*program, "--project-name", project, "--file", str(file)]
    try:
        assert compose(program, "up", "--detach", "--scale", "trainer=1")
        async with Engine(ADDRESS) as engine:
            launcher = DockerLauncher(engine, project, "trireme", lambda _: None)
            (name,) = await launcher.start("trainer", 1)
            running = inspect(name)["State"]["StartedAt"]
            for count in ("2", "1"):
                assert compose(program, "up", "--detach", "--remove-orphans", "--scale", f"trainer={count}")
                assert inspect(name)["State"]["StartedAt"] == running
                assert inspect(name)["State"]["Running"]
    finally:
        assert compose(program, "down", "--volumes", "--timeout", "20")
    for kind, what in (("ps", ["-aq"]), ("network", ["ls", "-q"]), ("volume", ["ls", "-q"])):
        assert docker(kind, *what, "--filter", f"label=com.docker.compose.project={project}") == ""


def compose(program: list[str], *arguments: str) -> bool:
    try:
        done = subprocess.run(
            [*program, *arguments], capture_output=True, text=True, timeout=120, check=False
        )
    except FileNotFoundError:
        return False
    print(done.stderr)  # noqa: T201
    return done.returncode == 0

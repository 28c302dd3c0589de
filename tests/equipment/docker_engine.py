"""A Docker Engine for tests without one: a real HTTP server at a UNIX socket with the routes that the
launcher uses.

It keeps containers, images and networks as dicts, refuses what Docker Engine 20.10 refuses, in its words, and
starts nothing. tests/soak/test_docker_launcher.py asks the same of a real one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

IMAGE = "sha256:" + "1" * 64
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def id_of(number: int) -> str:
    return f"{number:08x}" * 8


def container(number: int, service: str, **config: Any) -> dict[str, Any]:
    """As `docker inspect` shows one of a compose service of project `demo`."""
    id_ = id_of(number)
    labels = {
        "com.docker.compose.project": "demo",
        "com.docker.compose.service": service,
        "com.docker.compose.oneoff": "False",
        "com.docker.compose.container-number": "1",
    }
    return {
        "Id": id_,
        "Name": f"/demo_{service}_{number}",
        "Created": number,
        "State": {"Status": "running", "ExitCode": 0},
        "Image": IMAGE,
        "Config": {
            "Hostname": id_[:12],
            "Image": "trireme:latest",
            "User": "10001",
            "Env": [
                "PATH=/bin",
                "TRIREME_ETCD=http://etcd:2379",
                f"TRIREME_{service.upper()}S=1",
                "TRIREME_NAME=x",
            ],
            "Cmd": ["host"],
            "Labels": labels,
            "Volumes": {"/scratch": {}},
            "StopTimeout": 70,
            **config,
        },
        "HostConfig": {
            "Binds": ["demo_secrets:/run/secrets:ro", "demo_data:/data:rw", f"{'a' * 64}:/scratch:rw"],
            "Mounts": [
                {"Type": "volume", "Source": "b" * 64, "Target": "/var/lib/trireme"},
                {"Type": "bind", "Source": "/srv/data", "Target": "/datasets", "ReadOnly": True},
            ],
            "NetworkMode": "demo_default",
            "PortBindings": {"8470/tcp": [{"HostIp": "127.0.0.1", "HostPort": "8470"}]},
            "RestartPolicy": {"Name": "on-failure", "MaximumRetryCount": 3},
            "Memory": 1 << 30,
            "PidsLimit": 512,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "ReadonlyRootfs": True,
            "Tmpfs": {"/tmp": "size=64m"},
            "Init": True,
        },
        "NetworkSettings": {
            "Networks": {
                "demo_default": {
                    "Aliases": [service, id_[:12]],
                    "IPAddress": "172.18.0.9",
                    "IPAMConfig": None,
                },
                "demo_etcd": {"Aliases": [service, id_[:12]], "IPAddress": "172.19.0.9", "IPAMConfig": None},
            }
        },
    }


class DockerEngine:
    """`containers`: by id, as `docker inspect` shows them. `calls`: method and path of each. `before` may
    answer in place of the Engine, or take its time."""

    def __init__(self, socket: Path) -> None:
        self.address = f"unix://{socket}"
        self.containers: dict[str, dict[str, Any]] = {}
        self.images = {IMAGE, "trireme:latest"}
        self.networks = {"demo_default", "demo_etcd", "bridge"}
        self.about = {"ApiVersion": "1.41", "MinAPIVersion": "1.12"}
        self.calls: list[str] = []
        self.before: Callable[[web.Request], Awaitable[web.StreamResponse | None]] = _nothing

    def add(self, each: dict[str, Any]) -> None:
        self.containers[each["Id"]] = each

    def named(self, name: str) -> dict[str, Any]:
        return next(each for each in self.containers.values() if each["Name"] == f"/{name}")

    def names(self) -> list[str]:
        return sorted(each["Name"][1:] for each in self.containers.values())

    def end(self, name: str, code: int = 137) -> None:
        """As `docker kill` does: it is not started again."""
        self.named(name)["State"].update(Status="exited", ExitCode=code)

    # ------------------------------------------------------------ routes

    def application(self) -> web.Application:
        made = web.Application(middlewares=[self._first], client_max_size=1 << 20)
        made.router.add_get("/version", self._version)
        made.router.add_get("/{v}/containers/json", self.list_containers)
        made.router.add_get("/{v}/containers/{id}/json", self._inspect)
        made.router.add_post("/{v}/containers/create", self._create)
        made.router.add_post("/{v}/networks/{network}/connect", self._connect)
        made.router.add_post("/{v}/containers/{id}/start", self._start)
        made.router.add_post("/{v}/containers/{id}/stop", self._stop)
        made.router.add_delete("/{v}/containers/{id}", self._remove)
        return made

    @web.middleware
    async def _first(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.calls.append(f"{request.method} {request.path}")
        if (answer := await self.before(request)) is not None:
            return answer
        version = request.match_info.get("v", "v99.0")[1:]
        if tuple(map(int, version.split("."))) < tuple(map(int, self.about["MinAPIVersion"].split("."))):
            return refusal(
                400,
                f"client version {version} is too old. Minimum supported API version is "
                f"{self.about['MinAPIVersion']}",
            )
        return await handler(request)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response(self.about)

    async def list_containers(self, request: web.Request) -> web.Response:
        wanted = dict(each.split("=", 1) for each in json.loads(request.query["filters"])["label"])
        assert request.query["all"] == "1"
        found = [
            each for each in self.containers.values() if wanted.items() <= each["Config"]["Labels"].items()
        ]
        return web.json_response(
            [
                {
                    "Id": each["Id"],
                    "Names": [each["Name"]],
                    "Labels": each["Config"]["Labels"],
                    "Created": each["Created"],
                    "State": each["State"]["Status"],
                    "Status": f"Exited ({each['State']['ExitCode']}) 1 second ago"
                    if each["State"]["Status"] == "exited"
                    else "Up 1 second",
                }
                for each in found
            ]
        )

    async def _inspect(self, request: web.Request) -> web.Response:
        found = self._of(request)
        return web.json_response(found) if found else self._unknown(request)

    async def _create(self, request: web.Request) -> web.Response:
        body, name = await request.json(), request.query["name"]
        if body["Image"] not in self.images:
            return refusal(404, f"No such image: {body['Image']}")
        if name in self.names():
            return refusal(409, f'Conflict. The container name "/{name}" is already in use by container "…".')
        host, endpoints = body.pop("HostConfig"), body.pop("NetworkingConfig")["EndpointsConfig"]
        if len(endpoints) > 1:
            return refusal(400, "Container cannot be connected to network endpoints: " + ", ".join(endpoints))
        number = id_of(1000 + len(self.calls))
        made = {
            "Id": number,
            "Name": f"/{name}",
            "Created": 1000 + len(self.calls),
            "State": {"Status": "created", "ExitCode": 0},
            "Image": body["Image"],
            "Config": {"Hostname": number[:12], **body},
            "HostConfig": host,
            "NetworkSettings": {"Networks": endpoints},
        }
        self.add(made)
        return web.json_response({"Id": number, "Warnings": []}, status=201)

    async def _connect(self, request: web.Request) -> web.Response:
        body, network = await request.json(), request.match_info["network"]
        if network not in self.networks:
            return refusal(404, f"network {network} not found")
        self.containers[body["Container"]]["NetworkSettings"]["Networks"][network] = body["EndpointConfig"]
        return web.Response()

    async def _start(self, request: web.Request) -> web.Response:
        found = self._of(request)
        if found is None:
            return self._unknown(request)
        for network in found["NetworkSettings"]["Networks"]:
            if network not in self.networks:
                return refusal(404, f"network {network} not found")
        if found["State"]["Status"] == "running":
            return web.Response(status=304)
        found["State"]["Status"] = "running"
        return web.Response(status=204)

    async def _stop(self, request: web.Request) -> web.Response:
        found = self._of(request)
        if found is None:
            return self._unknown(request)
        if found["State"]["Status"] != "running":
            return web.Response(status=304)
        found["State"].update(Status="exited", ExitCode=0)
        return web.Response(status=204)

    async def _remove(self, request: web.Request) -> web.Response:
        found = self._of(request)
        if found is None:
            return self._unknown(request)
        if found["State"]["Status"] == "running" and request.query.get("force") != "1":
            return refusal(409, f"You cannot remove a running container {found['Id']}.")
        del self.containers[found["Id"]]
        return web.Response(status=204)

    def _of(self, request: web.Request) -> dict[str, Any] | None:
        asked = request.match_info["id"]
        return next(
            (
                each
                for each in self.containers.values()
                if each["Id"].startswith(asked) or each["Name"] == f"/{asked}"
            ),
            None,
        )

    def _unknown(self, request: web.Request) -> web.Response:
        return refusal(404, f"No such container: {request.match_info['id']}")


async def _nothing(_: web.Request) -> None:
    return None


def refusal(status: int, message: str) -> web.Response:
    return web.json_response({"message": message}, status=status)


@asynccontextmanager
async def serving(socket: Path) -> AsyncIterator[DockerEngine]:
    engine = DockerEngine(socket)
    runner = web.AppRunner(engine.application(), shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(socket)).start()
        yield engine
    finally:
        await runner.cleanup()


async def for_ever(_: web.Request) -> None:
    await asyncio.Event().wait()

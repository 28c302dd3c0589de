"""Containers with places for members, beside those of a compose project: each a copy of a container of the
service `trainer` or `pserver`.

start ─► inspect one of the service ─► create a copy, labelled ─► networks ─► start
         its process ends ─► the Engine starts it again, also while this launcher is away
stop  ─► SIGTERM, the service's grace, SIGKILL ─► remove
look  ─► what the Engine does not run any more (killed or stopped by hand) is removed; whoever sizes the pool
         starts another

Which containers are its own is written at them alone, as labels: a launcher that starts again finds those of
the one before. To compose they are one-off containers: `up` and `--scale` leave them, `down` takes them away.
Image, command, environment, volumes, limits, networks, health check and labels of a copy are those of the
service, so nothing has to be said twice; its name and the number of places are its own, it publishes no port,
and the Engine starts it again whatever its end was.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trireme.launchers.docker_engine import Engine
from trireme.launchers.launcher import Launched, OnEvent, Role
from trireme.view.child_events import ChildEvent
from trireme_shared.protocol.errors import Conflict, InvalidArgument, NotFound, TriremeError

KINDS: tuple[Role, ...] = ("trainer", "pserver")
LOOK_S = 2.0
AT_ONCE = 8  # calls that make or end containers
NAMES = 32  # so many taken names are passed over
RUNS = ("running", "restarting", "paused")  # by the Engine's own doing
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9.-]+")
PROJECT, SERVICE, ONE_OFF = (
    "com.docker.compose.project",
    "com.docker.compose.service",
    "com.docker.compose.oneoff",
)
CLUSTER, ROLE, ID = "trireme.cluster", "trireme.role", "trireme.id"
# for members to save and leave, if the service says nothing; the Engine's own 10 s are too short
GRACE_S = 60
ENVIRONMENT = {"trainer": "TRIREME_TRAINERS", "pserver": "TRIREME_PSERVERS"}
# of one container alone
_CONFIG = (
    "Hostname",
    "MacAddress",
    "AttachStdin",
    "AttachStdout",
    "AttachStderr",
    "OpenStdin",
    "StdinOnce",
    "Tty",
)
_HOST = (
    "PortBindings",
    "PublishAllPorts",
    "ContainerIDFile",
    "AutoRemove",
    "Links",
    "RestartPolicy",
    "Binds",
    "Mounts",
)
# a volume that belongs to one container; a new container gets its own
_WITHOUT_NAME = re.compile(r"[0-9a-f]{64}(:|$)")


@dataclass(frozen=True, slots=True)
class _Container:
    id: str
    role: Role
    state: str
    status: str
    created: int


class DockerLauncher:
    """`project`: of compose. `cluster`: root of its keys in etcd; launchers of other clusters and projects do
    not touch its containers. There must be one launcher for both. `look` once before its list is used; `run`
    keeps it true."""

    def __init__(self, engine: Engine, project: str, cluster: str, on_event: OnEvent) -> None:
        self.engine, self.project, self.cluster = engine, project, cluster
        self._on_event = on_event
        self._found: dict[str, _Container] = {}  # by name, oldest first
        self._changing = asyncio.Lock()  # a list that was read before a start must not be taken after it
        self._calls = asyncio.Semaphore(AT_ONCE)
        self._told: set[str] = set()

    def __repr__(self) -> str:
        return f"<DockerLauncher of {self.project}: {len(self._found)} containers>"

    async def run(self) -> None:
        """Until cancelled."""
        failed = ""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
                failed = ""
            except TriremeError as error:  # what was known stays true until the Engine says otherwise
                if error.message != failed:
                    failed = error.message
                    self._on_event(ChildEvent("launcher", "waiting", error.message))

    async def look(self) -> None:
        """Which containers there are. Those that the Engine does not run are removed. Raises as Engine
        does."""
        async with self._changing:
            listed = await self.engine.containers({PROJECT: self.project, CLUSTER: self.cluster})
            there = {str(each["Labels"][ID]): _container(each) for each in listed if _is_ours(each["Labels"])}
            ended = {name: each for name, each in there.items() if each.state not in RUNS}
            for name, each in ended.items():
                if each.state != "removing":
                    await self.engine.remove(each.id)
                    self._on_event(ChildEvent(name, "died", f"{each.status or each.state}: removed"))
            kept = {name: each for name, each in there.items() if name not in ended}
            for name in self._found.keys() - there.keys():
                self._on_event(ChildEvent(name, "died", "somebody has removed it"))
            self._tell_failing(kept)
            self._found = dict(sorted(kept.items(), key=lambda item: (item[1].created, item[0])))

    # ------------------------------------------------------------ the interface

    async def start(self, role: Role, count: int) -> Sequence[str]:
        """One container for each place. Raises as Engine does; what could be started then is kept."""
        if role not in KINDS:
            raise InvalidArgument(f"containers of kind {role} are not copied: scale the service with compose")
        async with self._changing:
            source = await self._source(role)
            taken = set(self._found)
            first = [await self._start(source, role, taken)] if count else []  # what stops one stops all
            rest = (self._start(source, role, taken) for _ in range(count - len(first)))
            done = await asyncio.gather(*rest, return_exceptions=True)
        for each in done:
            if isinstance(each, BaseException):
                raise each
        return [*first, *map(str, done)]

    async def stop(self, ids: Collection[str]) -> None:
        """Raises as Engine does; who could not be stopped stays in the list."""
        async with self._changing:
            gone = [(name, self._found[name]) for name in ids if name in self._found]
            done = await asyncio.gather(*(self._end(*each) for each in gone), return_exceptions=True)
        for each in done:
            if isinstance(each, BaseException):
                raise each

    def list(self) -> list[Launched]:
        return [Launched(name, each.role) for name, each in self._found.items()]

    # ------------------------------------------------------------ parts

    async def _source(self, role: Role) -> Mapping[str, Any]:
        """The newest container of the service, in full; else the newest copy of one."""
        listed = await self.engine.containers({PROJECT: self.project, SERVICE: role})
        copies = [each for each in listed if each["Labels"].get(CLUSTER) == self.cluster]
        own = [each for each in listed if each["Labels"].get(ONE_OFF, "False") != "True"]
        newest = max(own or copies, key=lambda each: int(each["Created"]), default=None)
        if newest is None:
            hint = f"let compose create one: docker compose up --scale {role}=1"
            raise NotFound(
                f"compose project {self.project} has no container of service {role} to copy", hint=hint
            )
        return await self.engine.container(str(newest["Id"]))

    def _free(self, role: Role, taken: set[str]) -> str:
        """Also a name in the pool. It is in `taken` afterwards."""
        project = _NOT_IN_NAMES.sub("-", self.project)[:32]
        number = next(k for k in range(len(taken) + 1) if f"{project}-{role}-launched-{k}" not in taken)
        taken.add(name := f"{project}-{role}-launched-{number}")
        return name

    async def _start(self, source: Mapping[str, Any], role: Role, taken: set[str]) -> str:
        """Its name, which is not of `taken`."""
        async with self._calls:
            name, container, creation = await self._create(source, role, taken)
            try:
                for network, endpoint in creation.networks.items():
                    await self.engine.connect(network, container, endpoint)
                await self.engine.start(container)
            except TriremeError:
                with contextlib.suppress(TriremeError):  # else the next look removes it
                    await self.engine.remove(container)
                raise
            self._found[name] = _Container(container, role, "running", "", 0)
        return name

    async def _create(
        self, source: Mapping[str, Any], role: Role, taken: set[str]
    ) -> tuple[str, str, Creation]:
        """Name, id, and what it was made from. Containers of others may have a name already."""
        for _ in range(NAMES):
            name = self._free(role, taken)
            creation = copy_of(source, self.cluster, role, name)
            try:
                return name, await self.engine.create(name, creation.body), creation
            except Conflict as error:
                refused = error
        raise refused

    async def _end(self, name: str, container: _Container) -> None:
        async with self._calls:
            try:
                found = await self.engine.container(container.id)
                await self.engine.stop(container.id, int(found["Config"].get("StopTimeout") or GRACE_S))
            except NotFound:
                pass
            await self.engine.remove(container.id)
        del self._found[name]

    def _tell_failing(self, there: Mapping[str, _Container]) -> None:
        failing = {name for name, each in there.items() if each.state == "restarting"}
        for name in failing - self._told:
            self._on_event(
                ChildEvent(name, "died", f"{there[name].status}: the Engine starts it again; see its log")
            )
        self._told = failing


def _is_ours(labels: Mapping[str, str]) -> bool:
    return bool(labels.get(ID)) and labels.get(ROLE) in KINDS


def _container(listed: Mapping[str, Any]) -> _Container:
    return _Container(
        id=str(listed["Id"]),
        role=listed["Labels"][ROLE],
        state=str(listed["State"]),
        status=str(listed.get("Status", "")),
        created=int(listed["Created"]),
    )


@dataclass(frozen=True, slots=True)
class Creation:
    """`body`: of POST /containers/create. `networks`: those it must be connected to before it starts, with
    the endpoint in each; an Engine before API 1.44 takes only one in the body."""

    body: dict[str, Any]
    networks: Mapping[str, Mapping[str, Any]]


def copy_of(found: Mapping[str, Any], cluster: str, role: Role, name: str) -> Creation:
    """`found`: as `docker inspect` shows it. `name`: of the new container and of its host agent."""
    config = {key: value for key, value in found["Config"].items() if key not in _CONFIG}
    host = {key: value for key, value in found["HostConfig"].items() if key not in _HOST}
    places = {variable: str(int(kind == role)) for kind, variable in ENVIRONMENT.items()}
    binds = [bind for bind in found["HostConfig"].get("Binds") or () if not _WITHOUT_NAME.match(bind)]
    networks = _networks(found)
    mode = str(host.get("NetworkMode", ""))
    first = mode if mode in networks else next(iter(networks), "")
    body = {
        **config,
        "Image": found["Image"],  # the very one, also if its tag has moved on
        "Env": _with(config.get("Env") or (), {"TRIREME_NAME": name, **places}),
        "Labels": {**(config.get("Labels") or {}), ONE_OFF: "True", CLUSTER: cluster, ROLE: role, ID: name},
        "StopTimeout": config.get("StopTimeout") or GRACE_S,
        "HostConfig": {
            **host,
            "Binds": binds,
            "Mounts": _mounts(found),
            "RestartPolicy": {"Name": "unless-stopped"},
        },
        "NetworkingConfig": {"EndpointsConfig": {first: networks[first]} if first else {}},
    }
    return Creation(body, {network: endpoint for network, endpoint in networks.items() if network != first})


def _with(environment: Any, changed: Mapping[str, str]) -> list[str]:
    kept = [line for line in environment if line.partition("=")[0] not in changed]
    return [*kept, *(f"{name}={value}" for name, value in changed.items())]


def _mounts(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    mounts = []
    for mount in found["HostConfig"].get("Mounts") or ():
        own = mount["Type"] == "volume" and _WITHOUT_NAME.match(mount.get("Source") or "")
        mounts.append({**mount, "Source": ""} if own else dict(mount))
    return mounts


def _networks(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Names and endpoints. Addresses are the Engine's to give; names of the copied container itself are left
    out."""
    mode = str(found["HostConfig"].get("NetworkMode", ""))
    if mode in ("host", "none") or mode.startswith("container:"):
        return {}
    own = {found["Id"][:12], found["Name"].lstrip("/")}
    networks = (found.get("NetworkSettings") or {}).get("Networks") or {}
    return {
        name: {"Aliases": [alias for alias in endpoint.get("Aliases") or () if alias not in own]}
        for name, endpoint in sorted(networks.items())
    }

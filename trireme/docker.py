"""`python -m trireme.docker`: beside a cluster of a compose project; starts containers with places while jobs
need more of them.

    leader ── GET /v1/pool ──> how many members the jobs need ──> Docker Engine: containers as those of
        `trainer` and `pserver`

exit 0: asked to stop (its containers stay, and the next launcher finds them); 1: an error; 2: configuration
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pydantic import Field

from trireme.client import AsyncClient
from trireme.launchers.docker_engine import DEFAULT, Engine
from trireme.launchers.docker_launcher import PROJECT, DockerLauncher
from trireme.launchers.sizing import Bounds, PoolSize
from trireme.view.child_events import ChildEvent
from trireme.view.job_address import client_of
from trireme_shared.platform.membership.settings import MemberSettings
from trireme_shared.platform.runtime import output, service, telemetry
from trireme_shared.platform.runtime.containment import Containment
from trireme_shared.protocol.errors import InvalidArgument, NotFound, NotLeader, PeerError
from trireme_shared.protocol.records.cluster import Kind

REQUEST_TIMEOUT_S = 5.0

log = telemetry.logger("docker_launcher")


class Settings(MemberSettings):
    """`url`: of a master, the leader or a standby. `docker`: address of the Engine. `project`: of compose
    ("": that of the container in which this runs). `max_trainers`, `max_pservers`: containers that it may
    have, beside those of compose."""

    job: str = ""
    url: str = Field(min_length=1)
    docker: str = DEFAULT
    project: str = ""
    max_trainers: int = Field(default=8, ge=0, le=10_000)
    max_pservers: int = Field(default=2, ge=0, le=1024)


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m trireme.docker",
        description="Starts containers with places for trainers and parameter servers while the jobs of a "
        "cluster need more than "
        "there are, and stops them a minute after. They are copies of the containers of the "
        "services `trainer` and `pserver` of a "
        "compose project. All settings come from the environment: TRIREME_URL (of a master), "
        "TRIREME_TOKEN or TRIREME_TOKEN_FILE "
        "(a viewer's is enough), TRIREME_DOCKER (the Engine's address; default: "
        "unix:///var/run/docker.sock), TRIREME_MAX_TRAINERS, "
        "TRIREME_MAX_PSERVERS (containers that it may have), TRIREME_PROJECT (of compose; default: "
        "its own container's), "
        "TRIREME_ROOT, TRIREME_LOG_LEVEL. Whoever reaches the Engine is root on its machine: "
        "docs/cluster.md.",
    ).parse_args()
    settings = Settings.from_environment()
    output.patient()
    telemetry.configure(level=settings.log_level, service="docker_launcher")
    return service.run(lambda stopping: serve(settings, stopping))


async def serve(settings: Settings, stopping: asyncio.Event) -> int:
    """Until `stopping`: 0. Raises InvalidArgument: the project is not known; as Engine does while it cannot
    be used at all."""
    async with Engine(settings.docker) as engine:
        project = settings.project or await project_of(engine, socket.gethostname())
        launcher = DockerLauncher(engine, project, settings.root, _tell)
        await launcher.look()
        bounds: dict[Kind, Bounds] = {
            "trainer": Bounds(0, settings.max_trainers),
            "pserver": Bounds(0, settings.max_pservers),
        }
        log.info("started", project=project, containers=len(launcher.list()))
        service.ready()
        async with asyncio.TaskGroup() as group:
            sizing = PoolSize(launcher, bounds, Leader(settings).connect, _tell)
            keep = Containment().keep
            beside = [
                group.create_task(keep(launcher.run, "following the containers")),
                group.create_task(keep(sizing.run, "following what jobs need")),
            ]
            await stopping.wait()
            for task in beside:
                task.cancel()
    return 0


async def project_of(engine: Engine, container: str) -> str:
    """The compose project of a container. Raises InvalidArgument if it has none, and as Engine does."""
    hint = "give the project's name in TRIREME_PROJECT"
    try:
        labels = (await engine.container(container))["Config"].get("Labels") or {}
    except NotFound as error:
        raise InvalidArgument(
            f"{engine.address} knows no container {container}, where this runs", hint=hint
        ) from error
    if not labels.get(PROJECT):
        raise InvalidArgument(f"container {container}, where this runs, is of no compose project", hint=hint)
    return str(labels[PROJECT])


class Leader:
    """The leader as any master tells it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._url = self._silent = ""

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[AsyncClient]:
        token = self._settings.own_token()
        url = self._url or self._settings.url
        async with client_of(url, token, REQUEST_TIMEOUT_S) as cluster:
            try:
                yield cluster
                if self._silent:
                    self._silent = ""
                    log.info("leader_found", url=url)
            except PeerError as error:
                told = error.details.get("leader") if isinstance(error, NotLeader) else ""
                self._url = str(told or "")
                if not told and self._silent != error.message:
                    self._silent = error.message
                    log.warning("no_leader", url=url, cause=error.message)
                raise


def _tell(event: ChildEvent) -> None:
    write = log.info if event.what in ("grown", "shrunk") else log.warning
    write(event.what, of=event.child, cause=event.cause)


if __name__ == "__main__":
    sys.exit(main())

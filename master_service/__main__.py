"""`python -m master_service`: serve REST, then campaign with the address that was really bound.

SIGTERM: the lease is revoked first (a standby leads at once), then the server closes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import socket
import sys
from pathlib import Path

from master_service.api.app import make_app
from master_service.api.server import Server
from master_service.leadership.master import Master
from master_service.settings import Settings, read_spec
from master_service.storage.job_storage import FileStorage
from shared.errors import InvalidArgument
from shared.keys import Keys
from shared.membership.local_script import LocalScripts
from shared.records import Dispatch, JobSpec
from shared.runtime import ids, service, telemetry

START_S = 10.0

log = telemetry.logger("main")


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m master_service",
        description="The master of one Trireme job. All settings come from the environment: TRIREME_JOB (required), "
        "TRIREME_ETCD, TRIREME_SPEC (JSON file, for the job's first master), TRIREME_HOST, TRIREME_PORT, "
        "TRIREME_ADVERTISE, TRIREME_NAME, TRIREME_TOKEN, TRIREME_MASTER_TTL_S, TRIREME_LOG_LEVEL.",
    ).parse_args()
    settings = Settings.from_environment()
    telemetry.configure(level=settings.log_level, service="master", member=settings.name)
    return service.run(lambda stopping: _serve(settings, stopping))


async def _serve(settings: Settings, stopping: asyncio.Event) -> int:
    spec = _read_spec(settings.spec) if settings.spec else None
    name = ids.new_id(settings.name)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=512)
    except OSError as error:
        msg = f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; free it or set TRIREME_PORT"
        raise InvalidArgument(msg) from error
    listener.setblocking(False)
    host = settings.advertise or settings.host
    if host in {"0.0.0.0", "::"}:
        host = socket.gethostname()
    url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    etcd = settings.connect()
    scripts = LocalScripts(etcd, settings.root, settings.sources)
    master = Master(
        etcd,
        Keys(settings.job, settings.root),
        name=name,
        url=url,
        spec=spec,
        ttl_s=settings.master_ttl_s,
        storage=lambda spec: FileStorage(spec, scripts.find),
    )
    service.ready()
    service.settled()
    gc.set_threshold(10_000, 20, 20)
    server = Server(make_app(master, token=settings.token))
    log.info("serving", url=url, master=name)
    try:
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(server.serve(sockets=[listener]))
            try:
                await master.run(stopping)
            finally:
                server.should_exit = True
            await serving
    finally:
        listener.close()
        await etcd.close()
    return 0


def _read_spec(path: Path) -> JobSpec:
    spec = read_spec(path)
    if spec.dispatch is not Dispatch.MASTER:
        msg = f"TRIREME_SPEC={path} has dispatch: {spec.dispatch}: the job runs without a master; start `python -m trireme.masterless`"
        raise InvalidArgument(msg)
    return spec


if __name__ == "__main__":
    sys.exit(main())

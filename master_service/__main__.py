"""`python -m master_service`: choose a port, serve REST, then campaign with the address that was really
bound.

no TRIREME_PORT ─► the port in TRIREME_PORT_FILE, if it is free ─► else any free one, which is kept there
SIGTERM: the lease is revoked first (a standby leads at once), then the server closes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import sys
from pathlib import Path

from master_service.api.app import guarded, make_api, warm_up
from master_service.api.routes.logs import LogSource
from master_service.api.server import Server
from master_service.cluster.leader import ClusterMaster
from master_service.garbage import Collections
from master_service.leadership.master import Master
from master_service.settings import Settings, read_spec
from master_service.storage.job_storage import FileStorage
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.local_script import LocalScripts
from trireme_shared.platform.membership.settings import CONFIGURATION
from trireme_shared.platform.runtime import ids, output, service, telemetry
from trireme_shared.platform.runtime.containment import LongLivedGroup
from trireme_shared.platform.runtime.process_setup import fix_hash_seed
from trireme_shared.platform.security import private_files
from trireme_shared.platform.security.access import family_of
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.keys import ClusterKeys, Keys
from trireme_shared.protocol.records import Dispatch, JobSpec

WAITING = 512  # connections that nobody has accepted yet

log = telemetry.logger("main")


def listen(settings: Settings) -> socket.socket:
    """Raises InvalidArgument if nobody can listen there."""
    file = settings.port_file if settings.port == 0 else None
    listener = None
    if file is not None and (before := _kept_port(file)):
        with contextlib.suppress(OSError):  # somebody else has it now
            listener = _at(settings.host, before)
    try:
        listener = listener or _at(settings.host, settings.port)
    except OSError as error:
        msg = (
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; free it or set TRIREME_PORT"
        )
        raise InvalidArgument(msg) from error
    listener.setblocking(False)
    if file is not None:
        try:
            private_files.write_text(file, str(listener.getsockname()[1]))
        except OSError as error:  # a full disk, say: the next process has another port
            log.warning("port_not_kept", file=str(file), cause=str(error))
    return listener


def _at(host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), family=family_of(host), backlog=WAITING)


def _kept_port(file: Path) -> int:
    """Of a process before; 0: there is none, or the file says nothing that is a port."""
    try:
        port = int(file.read_text())
    except (OSError, ValueError):
        return 0
    return port if 0 < port < 1 << 16 else 0


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m master_service",
        description="The master of one Trireme job, or of a cluster of jobs. All settings come from the "
        "environment: "
        "TRIREME_JOB with TRIREME_SPEC (JSON file, for the job's first master), or without a job "
        "TRIREME_STORAGE (path or URL for "
        "the files of all jobs), TRIREME_STORAGE_ALLOWED and TRIREME_REBALANCE_S; TRIREME_ETCD, "
        "TRIREME_ROOT, TRIREME_HOST, TRIREME_PORT, "
        "TRIREME_PORT_FILE (keeps the port of a free choice), TRIREME_ADVERTISE, TRIREME_NAME, "
        "TRIREME_LOGS (folders of members' logs that it serves), TRIREME_TOKEN, "
        "TRIREME_TOKENS_FILE, TRIREME_ALLOWED_HOSTS, TRIREME_MASTER_TTL_S, TRIREME_LOG_LEVEL.",
    ).parse_args()
    settings = Settings.from_environment()
    if not settings.job and not settings.storage:
        sys.stderr.write(
            "set TRIREME_JOB (lead that job) or TRIREME_STORAGE (lead a cluster of jobs, whose "
            "files go there)\n"
        )
        return CONFIGURATION
    output.patient()
    telemetry.configure(level=settings.log_level, service="master", member=settings.name)
    settings.look_up_own_name()
    return service.run(lambda stopping: _serve(settings, stopping))


async def _serve(settings: Settings, stopping: asyncio.Event) -> int:
    name = ids.new_id(settings.name)
    listener = listen(settings)
    url = f"{settings.tls.scheme}://{settings.advertised}:{listener.getsockname()[1]}"
    access, tls = settings.access, settings.tls.server()
    etcd = settings.etcd_access.connect(share_watches=not settings.job)
    master = _master(settings, etcd, name, url)
    service.ready(url)
    service.settled()
    Collections().begin()
    logs = LogSource(settings.logs, by_job=not settings.job)
    api = make_api(master, logs)
    server = Server(guarded(api, master, access, settings.tls.client()), tls=tls)
    log.info("serving", url=url, master=name, open_files=service.open_files()[1])
    try:
        async with LongLivedGroup() as group:
            serving = group.create_task(server.serve(sockets=[listener]))
            warming = group.create_task(warm_up(api, master))
            try:
                await master.run(stopping)
            finally:
                warming.cancel()
                server.should_exit = True
            await serving
    finally:
        listener.close()
        await etcd.close()
    return 0


def _master(settings: Settings, etcd: Etcd, name: str, url: str) -> Master | ClusterMaster:
    ttl_s, scripts = settings.master_ttl_s, LocalScripts(etcd, settings.root, settings.sources)

    def storage(spec: JobSpec) -> FileStorage:
        return FileStorage(spec, lambda script: scripts.find(script, spec.sources))

    if settings.job:
        spec = _read_spec(settings.spec) if settings.spec else None
        keys = Keys(settings.job, settings.root)
        return Master(etcd, keys, name=name, url=url, spec=spec, ttl_s=ttl_s, storage=storage)
    return ClusterMaster(
        etcd,
        ClusterKeys(settings.root),
        name=name,
        url=url,
        storage_url=settings.storage,
        storage_allowed=settings.storage_allowed,
        ttl_s=ttl_s,
        rebalance_s=settings.rebalance_s,
        job_retention_s=settings.job_retention_s,
        storage=storage,
    )


def _read_spec(path: Path) -> JobSpec:
    spec = read_spec(path)
    if spec.dispatch is not Dispatch.MASTER:
        msg = (
            f"TRIREME_SPEC={path} has dispatch: {spec.dispatch}: the job runs without a master; start "
            "`python -m trireme.masterless`"
        )
        raise InvalidArgument(msg)
    return spec


if __name__ == "__main__":
    fix_hash_seed()
    sys.exit(main())

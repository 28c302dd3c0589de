"""`python -m pserver_service`: one parameter server, configured by TRIREME_* variables.

bind -> claim ps/<index> -> serve ... SIGTERM: save the parameters, release the index, exit 0
                                      (Drain in member.py)
                                      index lost: exit 75, to be started again
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING

from trireme_shared import __version__

if TYPE_CHECKING:
    from pserver_service.settings import Settings

LEAVE_S = 5.0  # to release the index and to close connections


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pserver_service", description="One parameter server of a Trireme job."
    )
    parser.epilog = (
        "Settings come from the environment: TRIREME_JOB (required), TRIREME_ETCD, TRIREME_TOKEN, "
        "TRIREME_TOKENS_FILE, TRIREME_ALLOWED_HOSTS, TRIREME_HOST, TRIREME_PORT, "
        "TRIREME_ADVERTISE, TRIREME_UDS, TRIREME_NAME, TRIREME_THREADS, TRIREME_DRAIN_SECONDS, "
        "TRIREME_LOG_LEVEL."
    )
    parser.parse_args()

    from pserver_service.settings import Settings  # noqa: PLC0415  --help answers without loading torch
    from trireme_shared.platform.runtime import service, telemetry  # noqa: PLC0415

    settings = Settings.from_environment()
    telemetry.configure(level=settings.log_level, service="pserver", job=settings.job)
    settings.look_up_own_name()
    limit_s = settings.drain_seconds + LEAVE_S
    return service.run(lambda stopping: _serve(settings, stopping), drain_s=limit_s)


async def _serve(settings: Settings, stopping: asyncio.Event) -> int:
    import torch  # noqa: PLC0415

    from pserver_service.context import (  # noqa: PLC0415
        OwnIndex,
        PserverContext,
        own_number,
    )
    from pserver_service.handoff_client import HttpHandoff  # noqa: PLC0415
    from pserver_service.member import Member  # noqa: PLC0415
    from trireme_shared.checkpoints.writer import Background  # noqa: PLC0415
    from trireme_shared.platform.membership.directory import Directory  # noqa: PLC0415
    from trireme_shared.platform.runtime import ids, service  # noqa: PLC0415
    from trireme_shared.platform.runtime.http import own_network  # noqa: PLC0415
    from trireme_shared.platform.runtime.process_setup import optimizers_without_compiler  # noqa: PLC0415
    from trireme_shared.protocol.keys import Keys  # noqa: PLC0415
    from trireme_shared.protocol.records import PserverMember  # noqa: PLC0415
    from trireme_shared.serving.data_plane.row_turns import RowTurns  # noqa: PLC0415
    from trireme_shared.serving.data_plane.server import (  # noqa: PLC0415
        is_lasting,
        make_app,
        serving,
        socket_path,
    )
    from trireme_shared.serving.ports import ServerPorts, compile_in_thread  # noqa: PLC0415
    from trireme_shared.serving.pserver import Pserver  # noqa: PLC0415
    from trireme_shared.serving.transport.shared_memory import RegionAllocator  # noqa: PLC0415

    torch.set_num_threads(settings.threads)
    optimizers_without_compiler()
    ports = ServerPorts(RegionAllocator, settings.max_wait_s, RowTurns, compile_in_thread)
    pserver = Pserver(settings.job, ids.new_id(settings.name), ports=ports)
    app = make_app(pserver, settings.access, stall_s=settings.stall_s, idle_s=settings.idle_s)
    etcd = settings.connect()
    background = Background(stopping.is_set)
    try:
        uds = socket_path(settings.uds, pserver.incarnation)
        async with serving(
            app, settings.host, settings.port, uds, settings.tls.server(), lenient=is_lasting(settings.uds)
        ) as listening:
            record = PserverMember(
                index=-1,
                url=f"{settings.tls.scheme}://{settings.advertised}:{listening.port}",
                incarnation=pserver.incarnation,
                host=socket.gethostname(),
                pid=os.getpid(),
                network=own_network(),
                uds=listening.uds,
                trireme_version=__version__,
            )
            directory = Directory(etcd, Keys(settings.job, settings.root))
            own_index = OwnIndex(etcd, directory, record, own_number(settings.name), pserver.fits)
            connect = partial(HttpHandoff, token=settings.own_token, tls=settings.tls.client())
            member = Member(PserverContext(etcd, directory, pserver, own_index, background, connect))
            service.ready(record.url)
            service.settled()
            left = await member.serve(stopping, settings.claim_wait_s, settings.drain_seconds)
            return 0 if left else service.LEASE_LOST
    finally:
        background.close()
        await etcd.close()


if __name__ == "__main__":
    sys.exit(main())

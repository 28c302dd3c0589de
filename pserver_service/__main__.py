"""`python -m pserver_service`: one parameter server, configured by TRIREME_* variables.

bind -> claim ps/<index> -> serve ... SIGTERM: give the index back, exit 0;  index lost: exit 75, to be started anew
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pserver_service.settings import Settings

INDEX_LOST = 75
CONFIGURATION = 2
BACKGROUND_THREADS = 3  # a part being written, a commit, a checkpoint being loaded


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pserver_service", description="One parameter server of a Trireme job."
    )
    parser.epilog = (
        "Settings come from the environment: TRIREME_JOB (required), TRIREME_ETCD, TRIREME_TOKEN, TRIREME_HOST, TRIREME_PORT, "
        "TRIREME_ADVERTISE, TRIREME_UDS, TRIREME_NAME, TRIREME_THREADS, TRIREME_LOG_LEVEL."
    )
    parser.parse_args()

    from pydantic import ValidationError  # noqa: PLC0415  --help answers without loading torch

    from pserver_service.settings import Settings  # noqa: PLC0415
    from shared import service, telemetry  # noqa: PLC0415

    try:
        settings = Settings()
    except ValidationError as error:
        for item in error.errors():
            sys.stderr.write(f"TRIREME_{'_'.join(map(str, item['loc'])).upper()}: {item['msg']}\n")
        return CONFIGURATION
    telemetry.configure(level=settings.log_level, service="pserver", job=settings.job)
    return service.run(lambda stopping: _serve(settings, stopping))


async def _serve(settings: Settings, stopping: asyncio.Event) -> int:
    import torch  # noqa: PLC0415

    from pserver_service.app import make_app, serving  # noqa: PLC0415
    from pserver_service.core.optimizers import warm_up  # noqa: PLC0415
    from pserver_service.member import Member  # noqa: PLC0415
    from pserver_service.registration import Registration  # noqa: PLC0415
    from pserver_service.service import Pserver  # noqa: PLC0415
    from shared import etcd as etcd_client  # noqa: PLC0415
    from shared import ids  # noqa: PLC0415
    from shared.directory import Directory  # noqa: PLC0415
    from shared.keys import Keys  # noqa: PLC0415
    from shared.records import PserverMember  # noqa: PLC0415

    torch.set_num_threads(settings.threads)
    warm_up()
    pserver = Pserver(settings.job, ids.new_id(settings.name), max_wait_s=settings.max_wait_s)
    app = make_app(pserver, token=settings.token, stall_s=settings.stall_s, idle_s=settings.idle_s)
    keys = Keys(settings.job, settings.root)
    etcd = etcd_client.connect(
        settings.etcd,
        user=settings.etcd_user,
        password=settings.etcd_password,
        ca=settings.etcd_ca,
        cert=settings.etcd_cert,
        key=settings.etcd_key,
    )
    background = ThreadPoolExecutor(BACKGROUND_THREADS, "checkpoints")
    try:
        async with serving(app, settings.host, settings.port, settings.uds) as listening:
            member = PserverMember(
                index=-1,
                url=f"http://{_advertised(settings)}:{listening.port}",
                incarnation=pserver.incarnation,
                host=socket.gethostname(),
                pid=os.getpid(),
                uds=listening.uds,
            )
            directory = Directory(etcd, keys)
            registration = Registration(etcd, keys, directory, member)
            offload = partial(asyncio.get_running_loop().run_in_executor, background)
            life = Member(etcd, keys, directory, pserver, registration, offload)
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(stopping.wait()),
                    group.create_task(life.run(settings.claim_wait_s)),
                    group.create_task(directory.run()),
                ]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
            if not stopping.is_set():
                return INDEX_LOST
            await registration.release()
            return 0
    finally:
        background.shutdown(wait=False, cancel_futures=True)
        await etcd.close()


def _advertised(settings: Settings) -> str:
    host = settings.advertise or settings.host
    if host in {"0.0.0.0", "::"}:
        host = socket.gethostname()
    return f"[{host}]" if ":" in host else host


if __name__ == "__main__":
    sys.exit(main())

"""One trainer process: sockets, threads and the user's script around an Agent.

spec from etcd ─► the user's module and model ─► /healthz ─► Agent.run ─► exit code
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self

import aiohttp
from aiohttp import web

from shared import etcd as etcd_client
from shared import http, ids, telemetry
from shared.directory import Directory
from shared.errors import CallerError, TriremeError
from shared.keys import Keys
from shared.records import JobSpec, PserverMember, TrainerMember
from trainer_agent.agent import FAILED, Agent
from trainer_agent.compute import T
from trainer_agent.groups import single_error
from trainer_agent.master import HttpMaster, MasterPort
from trainer_agent.model import TorchCompute
from trainer_agent.retry import persist
from trainer_agent.settings import Settings
from trainer_agent.stream import StreamPserver
from trainer_agent.user_module import failure_of, load

REPORT_S = 30.0
READER_THREADS = 2

log = telemetry.logger("process")


async def serve(settings: Settings, stopping: asyncio.Event) -> int:
    """The trainer's exit code; see Agent.run. Leaves no task, thread or socket behind."""
    async with AsyncExitStack() as stack:
        etcd = etcd_client.connect(
            settings.etcd,
            user=settings.etcd_user,
            password=settings.etcd_password,
            ca=settings.etcd_ca,
            cert=settings.etcd_cert,
            key=settings.etcd_key,
        )
        stack.push_async_callback(etcd.close)
        directory = Directory(etcd, Keys(settings.job, settings.root))
        client = await stack.enter_async_context(http.session(settings.token))
        with single_error():
            async with asyncio.TaskGroup() as group:
                following = group.create_task(directory.run())
                try:
                    return await _run(settings, stopping, stack, etcd, directory, client)
                finally:
                    following.cancel()


async def _run(
    settings: Settings,
    stopping: asyncio.Event,
    stack: AsyncExitStack,
    etcd: etcd_client.Etcd,
    directory: Directory,
    client: aiohttp.ClientSession,
) -> int:
    trainer = ids.new_id(settings.name)
    telemetry.configure(level=settings.log_level, service="trainer", job=settings.job, member=trainer)
    await directory.wait_for(lambda view: view.spec is not None, settings.spec_wait_s, "the job's spec")
    assert directory.spec is not None
    spec, master = directory.spec, HttpMaster(directory, client)
    computing = stack.enter_context(ThreadPoolExecutor(1, "compute"))
    reading = stack.enter_context(ThreadPoolExecutor(READER_THREADS, "read"))
    try:
        compute = await asyncio.get_running_loop().run_in_executor(computing, _build, spec, computing)
    except CallerError as error:
        await _report_start(master, trainer, error)
        return FAILED
    log.info("model_built", compute=repr(compute))
    port = await stack.enter_async_context(_health(settings.host, settings.port))
    member = TrainerMember(
        trainer=trainer,
        url=f"http://{_advertised(settings)}:{port}",
        incarnation=trainer,
        host=socket.gethostname(),
        pid=os.getpid(),
    )
    pservers = await stack.enter_async_context(Connections(settings.token, settings.stall_s))

    async def offload(work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(reading, work, *arguments)

    agent = Agent(
        spec,
        member,
        etcd=etcd,
        directory=directory,
        compute=compute,
        master=master,
        connect=pservers,
        offload=offload,
        stopping=stopping,
    )
    return await agent.run()


def _build(spec: JobSpec, executor: ThreadPoolExecutor) -> TorchCompute:
    return TorchCompute(load(spec.script), spec, executor)


async def _report_start(master: MasterPort, trainer: str, error: TriremeError) -> None:
    """The script cannot be loaded or its model cannot be built: the master decides how often that is worth a try."""
    log.error("start_failed", code=error.code, message=error.message, hint=error.hint)
    failure = failure_of(error, task="building the model", trainer=trainer)
    try:
        await persist(lambda: master.report_failure(trainer, failure), "reporting a failure", REPORT_S)
    except TriremeError as unreported:
        log.warning("failure_unreported", cause=str(unreported))


class Connections:
    """A port to each incarnation of each pserver, opened when first asked for."""

    def __init__(self, token: str, stall_s: float) -> None:
        self._token, self._stall_s = token, stall_s
        self._open: dict[str, StreamPserver] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for port in self._open.values():
            await port.close()

    def __call__(self, member: PserverMember) -> StreamPserver:
        if member.incarnation not in self._open:
            self._open[member.incarnation] = StreamPserver(member, self._token, stall_s=self._stall_s)
        return self._open[member.incarnation]


@asynccontextmanager
async def _health(host: str, port: int) -> AsyncIterator[int]:
    """`/healthz` on an ephemeral port: the probe that tells a dead trainer from a slow one."""

    async def alive(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application()
    app.router.add_get("/healthz", alive)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def _advertised(settings: Settings) -> str:
    host = settings.advertise or settings.host
    if host in {"0.0.0.0", "::"}:
        host = socket.gethostname()
    return f"[{host}]" if ":" in host else host

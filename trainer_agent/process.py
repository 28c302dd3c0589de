"""One trainer process: the sockets, threads and user's script that an Agent needs.

    what the process before this one died at is told ─► spec from etcd ─► the user's module and model
        ─► /healthz ─► Agent.run ─► exit code

/healthz tells a dead trainer from a slow one, /readyz says whether its model is built, /metrics is for
Prometheus. The file of trireme_shared.platform.runtime.begun says what a process had begun when it died: one
report for each thing, and the master counts deaths by place.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from trainer_agent.agent import FAILED, Agent, AgentPorts
from trainer_agent.collective.native.link import backend_of
from trainer_agent.collective.ports import collective_ports
from trainer_agent.data import minibatch_indices, minibatches_in
from trainer_agent.data_plane.fleet_client import call_limit_s
from trainer_agent.data_plane.stream import Connections
from trainer_agent.membership.lease import Life, followed
from trainer_agent.model.devices import number_of
from trainer_agent.model.torch_compute import TorchCompute
from trainer_agent.own_loop.job_steps import JobSteps, telling
from trainer_agent.reading.messages import Setup
from trainer_agent.reading.pool import ReadingProcesses
from trainer_agent.script.user_module import load
from trainer_agent.settings import Settings
from trainer_agent.tasks.master import HttpMaster, MasterPort, failure_of
from trainer_agent.tasks.source import READS_AHEAD
from trainer_agent.waiting import SingleErrorGroup, end_tasks, retry
from trireme_shared import __version__
from trireme_shared.platform import etcd as etcd_client
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.membership.local_script import LocalScripts, ScriptChanged
from trireme_shared.platform.membership.status_server import StatusServer
from trireme_shared.platform.runtime import begun, http, ids, process_setup, service, telemetry
from trireme_shared.platform.runtime.containment import uninterrupted
from trireme_shared.platform.runtime.http import own_network
from trireme_shared.platform.security.access import Access
from trireme_shared.protocol.errors import (
    CallerError,
    DeadlineExceeded,
    InvalidArgument,
    NotReady,
    TriremeError,
)
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import Dispatch, FailTask, JobSpec, TrainerMember, UserFailure
from trireme_shared.protocol.records.datasets import MapStyle
from trireme_shared.protocol.records.tasks import READING, BegunWork

COUNTERS = {  # field of Done -> (name, help)
    "steps": ("steps", "shares of steps that were acknowledged (asynchronous: pushes)"),
    "records": ("records", "records in them"),
    "skipped_records": ("skipped_records", "records left out: their loss or gradient was not finite"),
    "tasks": ("tasks", "tasks that it has finished"),
}
REPORT_S = 30.0
NEW_SPEC_S = 10.0  # a master writes it when it takes over
READER_THREADS = READS_AHEAD + 1  # one is for what is waited for
_ANOTHER_DISPATCH = {
    Dispatch.ETCD: "job {job} has dispatch: etcd, its trainers keep the task queue themselves; start them "
    "with `python -m trireme.masterless`",
    Dispatch.MASTER: "job {job} has dispatch: master; start its trainers with `python -m trainer_agent`, and "
    "a master",
}
T = TypeVar("T")
log = telemetry.logger("process")
DIED = "ProcessDied"
NAMED_RANGES = 8


@dataclass(frozen=True, slots=True)
class TrainerContext:
    """What a MasterPort may need of the trainer. `url` answers as long as the trainer lives."""

    trainer: str
    url: str
    etcd: etcd_client.Etcd
    directory: Directory
    client: aiohttp.ClientSession


@asynccontextmanager
async def connect_master(context: TrainerContext) -> AsyncIterator[MasterPort]:
    """The MasterPort of a job with a master."""
    yield HttpMaster(context.directory, context.client, context.etcd)


ConnectMaster = Callable[[TrainerContext], AbstractAsyncContextManager[MasterPort]]


async def serve(
    settings: Settings,
    stopping: asyncio.Event,
    connect: ConnectMaster = connect_master,
    dispatch: Dispatch = Dispatch.MASTER,
) -> int:
    """Returns the trainer's exit code; see Agent.run. No task, thread or socket is left when it returns.

    `connect` opens the port for tasks and reports of jobs with that `dispatch`; other jobs are refused.
    """
    trainer = ids.new_id(settings.name)
    async with AsyncExitStack() as stack:
        etcd = settings.connect()
        stack.push_async_callback(etcd.close)
        directory = Directory(etcd, Keys(settings.job, settings.root))
        client = await stack.enter_async_context(http.session(settings.own_token, tls=settings.tls.client()))
        group = await stack.enter_async_context(SingleErrorGroup())
        stack.callback(group.create_task(uninterrupted(directory.run())).cancel)
        telemetry.configure(level=settings.log_level, service="trainer", job=settings.job, member=trainer)
        pages = StatusPages(settings.access)
        port = await stack.enter_async_context(
            pages.serving(settings.host, settings.port, settings.tls.server())
        )
        context = TrainerContext(
            trainer, f"{settings.tls.scheme}://{settings.advertised}:{port}", etcd, directory, client
        )
        master = await stack.enter_async_context(connect(context))
        spec = await _spec_of(directory, settings.spec_wait_s, stopping)
        if spec is None:
            return 0
        if spec.dispatch is not dispatch:
            raise InvalidArgument(_ANOTHER_DISPATCH[spec.dispatch].format(job=spec.job))
        service.ready(context.url)  # what fails from here on is reported to the master
        await _keep_journal(settings, spec, trainer, master, stack, group, stopping)
        return await _train(settings, stopping, stack, context, spec, master, pages)


async def _spec_of(directory: Directory, limit_s: float, stopping: asyncio.Event) -> JobSpec | None:
    """None: it was asked to stop first. The job may be gone already, and then there never is one. Raises
    DeadlineExceeded."""
    there = directory.wait_for(lambda view: view.spec is not None, limit_s, "the job's spec")
    waiting, asked = asyncio.ensure_future(there), asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait((waiting, asked), return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            waiting.result()
        return directory.spec
    finally:
        await end_tasks((waiting, asked))


async def _keep_journal(
    settings: Settings,
    spec: JobSpec,
    trainer: str,
    master: MasterPort,
    stack: AsyncExitStack,
    group: asyncio.TaskGroup,
    stopping: asyncio.Event,
) -> None:
    """What the process before this one died at is reported; from now on the file says what this one is at."""
    try:
        journal = begun.open_journal(journal_file(spec.job, settings.name))
    except OSError as error:
        log.warning("no_journal", cause=str(error))
        return
    stack.callback(begun.close_journal)
    if journal.left is not None:
        await report_last_end(journal.left, spec, master)
    journal.begin(trainer)
    journal.watch(spec.task_timeout_ceiling_s)

    async def pardon() -> None:
        await stopping.wait()
        journal.pardon()

    stack.callback(group.create_task(pardon()).cancel)


async def _train(
    settings: Settings,
    stopping: asyncio.Event,
    stack: AsyncExitStack,
    context: TrainerContext,
    spec: JobSpec,
    master: MasterPort,
    pages: StatusPages,
) -> int:
    spec = followed(spec, context.directory.layout)
    computing = stack.enter_context(ThreadPoolExecutor(1, "compute"))
    loop = asyncio.get_running_loop()

    def find_steps() -> JobSteps:  # in a thread of the script
        return asyncio.run_coroutine_threadsafe(steps_of(context.directory), loop).result()

    stack.enter_context(telling(find_steps))
    reading = stack.enter_context(ThreadPoolExecutor(READER_THREADS, "read"))
    try:
        scripts = LocalScripts(context.etcd, settings.root, settings.sources)
        script = await retry(
            lambda: find_script(context.directory, scripts), "reading the job's script", REPORT_S
        )
        shared = settings.transport in {"auto", "shm"}
        processes = _processes(spec, script, stack)
        compute = await asyncio.get_running_loop().run_in_executor(
            computing,
            _build,
            spec,
            script,
            computing,
            shared,
            number_of(settings.name),
            context.directory.layout.initial if context.directory.layout is not None else "",
        )
    except ScriptChanged:
        raise  # not the job's fault: it must not fail because of it
    except CallerError as error:
        await _report_start(master, context.trainer, error)
        return FAILED
    stack.callback(compute.close)
    log.info("model_built", compute=repr(compute))
    service.settled()
    collective = await stack.enter_async_context(collective_ports(settings, spec, context.trainer))
    member = TrainerMember(
        trainer=context.trainer,
        url=context.url,
        incarnation=context.trainer,
        host=socket.gethostname(),
        pid=os.getpid(),
        network=own_network(),
        exchange=collective.exchange if collective is not None else None,
        trireme_version=__version__,
    )

    async def offload(work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(reading, work, *arguments)

    async def alone(work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(computing, work, *arguments)

    life = Life(context.etcd, context.trainer, master)
    stack.callback(life.close)
    connections = await stack.enter_async_context(Connections(settings, call_limit_s(spec, settings.stall_s)))
    ports = AgentPorts(
        etcd=context.etcd,
        directory=context.directory,
        master=master,
        connect=connections,
        offload=offload,
        alone=alone,
        reading=processes,
        life=life,
        collective=collective.with_peers(connections.keep) if collective is not None else None,
    )
    agent = Agent(spec, member, compute, ports, stopping)
    if collective is None:
        context.directory.observers.append(lambda: connections.follow(context.directory))
    pages.agent = agent
    return await agent.run()


def _processes(spec: JobSpec, script: Path, stack: AsyncExitStack) -> ReadingProcesses | None:
    """They load the script while the model is built, and end with the stack."""
    if not spec.data_workers or not isinstance(spec.dataset, MapStyle):
        return None
    processes = ReadingProcesses(Setup(spec, script), spec.task_timeout_ceiling_s)
    stack.callback(processes.close)
    processes.begin()
    return processes


async def steps_of(directory: Directory) -> JobSteps:
    """What the job makes, as soon as its dataset is counted. Raises NotReady if that cannot be known any
    more."""
    while directory.plan is None or directory.spec is None:
        if directory.known_state.phase.final:
            raise NotReady("the job has ended before its dataset was counted")
        await directory.changed(directory.revision, NEW_SPEC_S)
    return JobSteps(directory.plan.steps, directory.spec.epochs)


async def find_script(directory: Directory, scripts: LocalScripts) -> Path:
    """Raises ScriptChanged if a file stays another than the spec says: a job that was started again gets a
    new spec by its master."""
    while True:
        spec = directory.spec
        assert spec is not None
        try:
            return await scripts.find(spec.script, spec.sources)
        except ScriptChanged as error:
            await _another_spec(directory, spec, error)


async def _another_spec(directory: Directory, known: JobSpec, error: ScriptChanged) -> None:
    """Raises `error` if there is none within NEW_SPEC_S."""
    try:
        await directory.wait_for(
            lambda view: view.spec is not None and view.spec.sources != known.sources,
            NEW_SPEC_S,
            "the job's new spec",
        )
    except DeadlineExceeded:
        raise error from None


def _build(
    spec: JobSpec, script: Path, executor: ThreadPoolExecutor, shared: bool, number: int, initial: str
) -> TorchCompute:
    process_setup.give_memory_back()
    if spec.exchange == "native":
        backend_of(spec.backend)
    return TorchCompute(load(script), spec, executor, shared=shared, number=number, initial=initial)


async def _report_start(master: MasterPort, trainer: str, error: TriremeError) -> None:
    """The script cannot be loaded or its model cannot be built: the master decides how often that is tried
    again."""
    log.error("start_failed", code=error.code, message=error.message, hint=error.hint)
    failure = failure_of(error, task="building the model", trainer=trainer)
    try:
        await retry(lambda: master.report_failure(trainer, failure), "reporting a failure", REPORT_S)
    except TriremeError as unreported:
        log.warning("failure_unreported", cause=str(unreported))


class StatusPages:
    """What a trainer answers by HTTP. `agent`: once there is one."""

    def __init__(self, access: Access) -> None:
        self.agent: Agent | None = None
        self._server = StatusServer(
            access, self, lambda: "" if self.agent is not None else "its model is not built yet"
        )

    def collect(self) -> Iterator[Metric]:
        agent = self.agent
        yield GaugeMetricFamily(
            "trireme_trainer_ready", "1 once its model is built", value=int(agent is not None)
        )
        if agent is None:
            return
        for field, (name, text) in COUNTERS.items():
            yield CounterMetricFamily(f"trireme_trainer_{name}", text, value=getattr(agent.done, field))
        if (lane_s := agent.pace.lane_s) is not None:
            text = "synchronous: forward and backward of one lane, the median of the last ones"
            yield GaugeMetricFamily("trireme_trainer_lane_seconds", text, value=lane_s)

    def serving(self, host: str, port: int, tls: ssl.SSLContext | None) -> AbstractAsyncContextManager[int]:
        """The port. `port` 0: a free one."""
        return self._server.serving(host, port, tls)


def journal_file(job: str, name: str) -> Path:
    """The one that the launcher has named; else one of this user in the system's temporary folder, which a
    container keeps when it is started again."""
    given = os.environ.get(begun.FILE)
    return Path(given) if given else Path(tempfile.gettempdir()) / f"trireme-begun-{os.getuid()}-{job}-{name}"


async def report_last_end(left: begun.Left, spec: JobSpec, master: MasterPort) -> None:
    """A master that does not answer within REPORT_S hears nothing of it."""
    name = left.process.rpartition("-")[0] or left.process
    for work in filter(None, map(BegunWork.from_bytes, left.works)):
        message = f"{name} {_how(left, spec)} while it {_what(work, spec)}"
        log.warning("died_before", cause=message)
        failure = UserFailure(
            error_type=DIED, message=message, task=f"task {work.task}", trainer=left.process
        )
        failed = FailTask(
            trainer=left.process, attempt=0, failure=failure, epoch=work.epoch, died_at=work.minibatch
        )
        try:
            # awaited here
            await retry(lambda: master.fail_task(work.task, failed), "reporting a death", REPORT_S)  # noqa: B023
        except TriremeError as error:
            log.warning("death_unreported", cause=str(error))


def _how(left: begun.Left, spec: JobSpec) -> str:
    end = os.environ.get(begun.LAST_END, "")
    if left.hung:
        return f"hung for {spec.task_timeout_ceiling_s:g} s (task_timeout_ceiling_s)"
    if end == "exit code 1":  # as the thread ends it that needs no interpreter
        return (
            f"ended with {end} (or kept the interpreter for {spec.task_timeout_ceiling_s:g} s; its log "
            "says which)"
        )
    if end == "SIGKILL":
        return "was killed by SIGKILL (out of memory?)"
    if end.startswith("out of memory"):
        return f"ran {end}"
    if end.startswith("SIG"):
        return f"crashed with {end}"
    return f"ended with {end}" if end else "ended"


def _what(work: BegunWork, spec: JobSpec) -> str:
    """`computed records 288, 290-291 of train.csv (task 7, minibatch 2)`."""
    if work.minibatch == READING:
        return f"read records {work.first}-{work.first + work.count - 1} of {work.file} (task {work.task})"
    where = f"(task {work.task}, minibatch {work.minibatch})"
    if work.minibatch >= minibatches_in(work.count, spec.minibatch_size):
        return f"computed a minibatch of {work.file} {where}"  # the settings have changed since
    indices = minibatch_indices(
        spec.seed,
        work.epoch,
        int(work.task.rpartition("-")[2]),
        work.count,
        spec.minibatch_size,
        work.minibatch,
        shuffle=spec.shuffle and work.task.isdigit(),
    )
    return f"computed records {_ranges(np.sort(indices) + work.first)} of {work.file} {where}"


def _ranges(numbers: np.ndarray) -> str:
    """`3, 5-7 and 12 more`."""
    parts = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    named = [f"{part[0]}" if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts[:NAMED_RANGES]]
    more = sum(len(part) for part in parts[NAMED_RANGES:])
    return ", ".join(named) + (f" and {more} more" if more else "")

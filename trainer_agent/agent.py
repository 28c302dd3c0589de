"""The life of a trainer: register, initialise or wait, train, evaluate and export, leave. Its process passes
in all ports.

    lease + trainers/<id> ─► parameters initialised ─► TRAIN (loop) ─► EVALUATE, EXPORT (evaluate_export)
        ─► job over: exit

A simulation runs this class on a virtual loop with its own etcd, network and compute.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from trainer_agent.collective.member import CollectiveMember, begin_together
from trainer_agent.collective.ports import CollectivePorts
from trainer_agent.core.duties import Duty
from trainer_agent.data_plane.fleet_client import Connect, FleetClient
from trainer_agent.data_plane.step_exchange import ParameterServers, StepExchange
from trainer_agent.loops.asynchronous import AsyncLoop
from trainer_agent.loops.context import LoopContext, RolledBack, on_timeline, timeline_of
from trainer_agent.loops.evaluate_export import EvaluateExportLoop
from trainer_agent.loops.evaluating import Evaluator
from trainer_agent.loops.sync import SyncLoop
from trainer_agent.membership.lease import Life, Membership, ensure_initialised, fits
from trainer_agent.membership.pause import PauseResponder
from trainer_agent.model.compute import Compute
from trainer_agent.reading.pool import ReadingProcesses
from trainer_agent.tasks.activity import Activity, LanePace, progress_every_s
from trainer_agent.tasks.master import MasterPort, failure_of
from trainer_agent.tasks.reports import Done, Reports
from trainer_agent.tasks.source import Offload, TaskSource
from trainer_agent.waiting import SingleErrorGroup, end_tasks, retry
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.runtime.containment import uninterrupted
from trireme_shared.platform.runtime.service import LEASE_LOST
from trireme_shared.protocol.errors import (
    InvalidArgument,
    LayoutMismatch,
    ResourceExhausted,
    StorageUnreachable,
    TriremeError,
    UserCodeError,
)
from trireme_shared.protocol.records import JobSpec, Mode, Phase, Task, TrainerMember
from trireme_shared.protocol.records.job import Paused

LOOK_S = 0.5
FLUSH_S = 5.0
LEAVE_S = 10.0
BUSY_LOOK_S = 0.02
NOBODY_S = 1.0

OK, FAILED = 0, 1

log = telemetry.logger("agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPorts:
    """What a trainer's process gives to its Agent, or a simulation in its place. `directory.run()` must run
    beside the Agent."""

    etcd: Etcd
    directory: Directory
    master: MasterPort
    #: to a parameter server, or to another trainer of a collective job
    connect: Connect
    #: runs what blocks, see TaskSource
    offload: Offload
    alone: Offload | None = None
    #: of a collective job: what this trainer is to the others
    collective: CollectivePorts | None = None
    #: processes that read for this trainer
    reading: ReadingProcesses | None = None
    #: of a process; a simulation has none
    life: Life | None = None


class Agent:
    """`run` returns the process's exit code, also once `stopping` is set."""

    def __init__(
        self,
        spec: JobSpec,
        member: TrainerMember,
        compute: Compute,
        ports: AgentPorts,
        stopping: asyncio.Event,
    ) -> None:
        etcd, directory, master, connect = ports.etcd, ports.directory, ports.master, ports.connect
        self._membership, self._offload, self._life = Membership(etcd, member), ports.offload, ports.life
        self._spec, self._member, self._etcd, self._directory = spec, member, etcd, directory
        self._compute, self._master, self._connect, self._stopping = compute, master, connect, stopping
        self._loop: SyncLoop | AsyncLoop | None = None
        self._activity = activity = Activity()
        self._reports = reports = Reports(
            master, member.trainer, activity, progress_every_s(spec.task_timeout_floor_s)
        )
        workers = ports.offload, ports.alone
        source = TaskSource(
            spec,
            master,
            member.trainer,
            *workers,
            reports.warn,
            by_columns=compute.by_columns,
            processes=ports.reading,
        )
        self.collective: CollectiveMember | None = None
        self._servers: ParameterServers | None = None
        exchange: StepExchange
        if ports.collective is not None:
            job = spec, etcd, directory, self._membership, compute
            self.collective = CollectiveMember(*job, connect, reports.suspect, ports.collective)
            exchange = self.collective.group
        else:
            fleet = FleetClient(directory, connect, compute.layout, reports.suspect, self._membership.certain)
            dtypes = spec.parameter_dtype, spec.gradient_dtype
            exchange = self._servers = ParameterServers(fleet, compute, *dtypes, spec.on_nonfinite)
        self._context = LoopContext(
            spec, etcd, directory, compute, exchange, source, reports, activity, stopping
        )
        self._evaluator = Evaluator(self._context)
        self._initial = compute.initial_lane_zero()
        self._pauses = PauseResponder(
            etcd, directory, self._membership, self._position, partial(reports.flush, FLUSH_S)
        )

    def __repr__(self) -> str:
        return f"<Agent {self._member.trainer} of {self._spec.job}>"

    @property
    def done(self) -> Done:
        """Since it began."""
        return self._reports.done

    @property
    def pace(self) -> LanePace:
        """How long lanes take, if that is known."""
        return self._activity.lane_pace

    def _position(self) -> Paused:
        return self._loop.position() if isinstance(self._loop, AsyncLoop) else Paused(uuid="")

    async def run(self) -> int:
        """0: the job is complete, or asked to stop; 1: the job failed; LEASE_LOST: start this trainer again
        under a new name."""
        timeline = timeline_of(self._directory)
        if self.collective is not None:  # before anything may load rows
            await self.collective.server.prepare_tables(self._compute.layout)
        if not await self._fits_job():
            return LEASE_LOST
        await self._context.source.make_datasets()
        await self._membership.register(self._directory.keys, self._spec.lease_ttl_s)
        name, view = self._member.trainer, self._directory
        view.observers.append(lambda: self._membership.follow(listed=name in view.trainers))
        async with SingleErrorGroup() as group:
            parts = [self._reports.run(), self._evaluator.run()]
            if self.collective is not None:
                parts.append(self.collective.run())
            if self._spec.mode is Mode.ASYNC:
                parts.append(self._pauses.run())
            if self._life is not None:
                parts.append(self._life.run(self._membership))
            beside = [group.create_task(uninterrupted(part)) for part in parts]
            work = group.create_task(uninterrupted(self._work()))
            ends = {
                group.create_task(self._membership.hold()): LEASE_LOST,
                group.create_task(self._started_over(timeline)): LEASE_LOST,
                group.create_task(self._job_is(Phase.FAILED)): FAILED,
                group.create_task(self._job_completed()): OK,
                group.create_task(self._stopped()): OK,
            }
            try:
                await asyncio.wait([work, *ends], return_when=asyncio.FIRST_COMPLETED)
                code = next((code for task, code in ends.items() if task.done()), OK)
                if work.done() and not work.cancelled() and work.exception() is None:
                    code = work.result()
                if self.collective is not None and code == OK:
                    await self.collective.until_saved(LEAVE_S)
                await self._membership.leave(asked=self._stopping.is_set())
            finally:
                await end_tasks((*beside, work, *ends))
        log.info("left", code=code)
        return code

    async def _fits_job(self) -> bool:
        """Before it registers, if the job's layout is known already: the job shall not count on a trainer
        that is refused. False: as `fits`. Raises LayoutMismatch."""
        view = self._directory
        if not view.init_done or view.layout is None:
            return True
        try:
            return fits(self._spec, self._compute.layout, view.layout)
        except LayoutMismatch as error:
            await self._report(error)
            raise

    async def _report(self, error: TriremeError) -> None:
        failure = failure_of(error, trainer=self._member.trainer)
        await retry(lambda: self._master.report_failure(self._member.trainer, failure), "reporting a failure")

    async def _work(self) -> int:
        try:
            if not await self._has_values():
                return LEASE_LOST
            while not self._stopping.is_set():
                while self._duty() is Duty.WAIT and not self._stopping.is_set():
                    await self._evaluator.as_spare()
                duty, timeline = self._duty(), timeline_of(self._directory)
                acquired = None
                if (
                    duty is Duty.TRAIN and self._compute.is_finished
                ):  # the job went back while the script was at its end
                    return LEASE_LOST
                if duty is Duty.TRAIN:
                    acquired = await self._train()
                    timeline = self._loop.timeline if self._loop else timeline
                    await self._reports.flush(FLUSH_S)
                if duty in (Duty.TRAIN, Duty.FINISH) and self._duty() is not Duty.LEAVE:
                    await self._evaluate_and_export(timeline, acquired)
                if self._duty() is Duty.LEAVE:
                    break
                await self._directory.changed(self._directory.revision, LOOK_S)
        except (
            InvalidArgument,
            UserCodeError,
            LayoutMismatch,
            ResourceExhausted,
            StorageUnreachable,
        ) as error:
            await self._report(error)
            raise
        state = self._directory.state
        return FAILED if state is not None and state.phase is Phase.FAILED else OK

    async def _has_values(self) -> bool:
        """False: only a new process can train."""
        job = self._spec, self._directory, self._etcd, self._membership, self._compute
        if self.collective is not None:
            usable = await begin_together(*job, self.collective.group, self._offload)
            self.collective.group.begun.set()
            return usable
        return await ensure_initialised(*job, self._connect)

    def _duty(self) -> Duty:
        return self._context.duty().duty

    async def _job_is(self, phase: Phase) -> None:
        """Ends when the job is in this final phase: what this trainer waits for will not come."""
        while self._directory.state is None or self._directory.state.phase is not phase:
            await self._directory.changed(self._directory.revision, LOOK_S)

    async def _job_completed(self) -> None:
        """Ends LEAVE_S after the job is complete: the masters may be gone, so nobody may answer the last
        reports."""
        await self._job_is(Phase.COMPLETED)
        await asyncio.sleep(LEAVE_S)

    async def _started_over(self, timeline: int) -> None:
        """Ends when the job starts over without a checkpoint: this trainer's model may be trained already,
        and only a new model can give initial values."""
        while True:
            state = self._directory.state
            if state is not None and state.timeline != timeline and not state.checkpoint:
                return
            await self._directory.changed(self._directory.revision, LOOK_S)

    async def _stopped(self) -> None:
        """Ends when `stopping` is set and no minibatch is being computed or pushed, or LEAVE_S later; after
        NOBODY_S without any parameter server: there is nobody to push to (the job is paused, say)."""
        await self._stopping.wait()
        now = seen = clock.monotonic()
        deadline = now + LEAVE_S
        while self._activity.busy and now < min(deadline, seen + NOBODY_S):
            await asyncio.sleep(BUSY_LOOK_S)
            now = clock.monotonic()
            seen = now if self._directory.pservers else seen

    async def _train(self) -> Task | None:
        """The task of another kind that ended an asynchronous training, if any."""
        if self._spec.mode is Mode.SYNC:
            self._loop = SyncLoop(self._context, self._initial, self._evaluator)
        else:
            assert self._servers is not None  # a collective job is synchronous
            self._loop = AsyncLoop(self._context, self._servers, self._pauses, self._initial, self._evaluator)
        self._activity.training = self._activity.active = self._loop
        return await self._loop.run()

    async def _evaluate_and_export(self, timeline: int, acquired: Task | None) -> None:
        """Evaluate and export. Returns early if the job went back to a checkpoint: there may be training to
        do again."""
        self._activity.active = loop = EvaluateExportLoop(self._context, self._evaluator)
        try:
            await on_timeline(self._directory, timeline, loop.run(acquired))
        except RolledBack as error:
            log.info("rolled_back", cause=str(error))

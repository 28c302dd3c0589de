"""What takes long (operations), and what asks for it: checkpoints, and resizes of the running job. What is
asked of a whole job of a cluster (pause, ...) is in jobs.py, and answered alike.

A request answers 202 with an Operation; `wait_s` waits for its end. One resize runs at a time; what one would
move is told without it. Models are exported by `trireme export`: that needs torch and the job's script, which
a master does not load.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Protocol

from fastapi import APIRouter, Depends, Query, Request, Response

from master_service.api import render
from master_service.api.problems import RETRY_AFTER_S
from master_service.api.routes.dependencies import (
    AnsweringInJob,
    JobsOf,
    Key,
    MasterOf,
    PageSize,
    PageToken,
    WaitS,
    answered,
    asked_by,
    committed,
    find_led,
    kept_answer,
    keyed_request,
)
from master_service.cluster.leader import ClusterMaster, JobsLed
from master_service.core.decisions.requests import AnsweredBefore, Keyed, Once
from master_service.leadership.master import Master
from trireme_shared.protocol.errors import NotFound
from trireme_shared.protocol.records.job_choices import MAX_MEMBERS
from trireme_shared.protocol.records.operations import Operation, OperationState, ResizePrediction, Strategy
from trireme_shared.protocol.rest import (
    CheckpointDetails,
    CheckpointPage,
    CreateCheckpoint,
    CreateResize,
    OperationPage,
    ResizePage,
    ResizeView,
)


class Operations(Protocol):
    """Where operations of one kind are kept: by a job, or by its cluster."""

    async def operation(self, job: str, operation_id: str, wait_s: float, /) -> Operation:
        """As etcd has it, once it has ended or after `wait_s`. Raises NotFound."""
        ...


@dataclass(frozen=True, slots=True)
class OfJob:
    """Those that the master of a job keeps with it."""

    master: Master

    async def operation(self, _: str, operation_id: str, wait_s: float, /) -> Operation:
        """See Operations."""
        operations = self.master.term.operations
        await operations.wait(operation_id, wait_s)
        return await committed(self.master, lambda: operations.get(operation_id))


@dataclass(frozen=True, slots=True)
class AskingFor:
    """What every request for an operation brings, and how it is answered: 202, with the place of its
    progress. `by`: for people, who asks."""

    job: str
    kept: Operations
    response: Response
    keyed: Keyed | None
    by: str
    wait_s: float

    @property
    def key(self) -> str:
        """What the operation's id is made of, so that the same request finds it again; "": a new id."""
        return self.keyed.key if self.keyed else ""

    async def begin(self, call: Callable[[Once[Operation] | None], Awaitable[Operation]]) -> Operation:
        """The operation as it is then. If it was asked for before and has been forgotten since: as it was at
        first."""
        try:
            begun = await answered(call(Once(self.keyed, lambda begun: begun) if self.keyed else None))
        except AnsweredBefore as before:
            begun = kept_answer(Operation, before.kept)
        self.response.headers["Location"] = f"/v1/jobs/{self.job}/operations/{begun.operation_id}"
        try:
            found = await self.kept.operation(self.job, begun.operation_id, self.wait_s)
        except NotFound:
            return begun
        if found.running:
            self.response.headers["Retry-After"] = str(RETRY_AFTER_S)
        return found


async def _asking(
    master: MasterOf, request: Request, response: Response, idempotency_key: Key = "", wait_s: WaitS = 0.0
) -> AskingFor:
    job = master.keys.job
    keyed = await keyed_request(request, idempotency_key, job=job)
    return AskingFor(job, OfJob(master), response, keyed, asked_by(request), wait_s)


Asking = Annotated[AskingFor, Depends(_asking)]


router = APIRouter(prefix="/operations", tags=["operations"])


@router.get("", operation_id="listOperations")
async def list_operations(
    jobs: JobsOf,
    request: Request,
    state: Annotated[OperationState | None, Query()] = None,
    page_size: PageSize = 100,
    page_token: PageToken = "",
) -> OperationPage:
    """Those that run and the last ones that ended, newest first; resizes are among them, and what was asked
    of the whole job."""
    name = _named(jobs, request)
    master = find_led(jobs, name)

    def page() -> OperationPage:
        found = list(master.job.operations.records.values()) if master is not None else []
        if isinstance(jobs, ClusterMaster):
            found += jobs.state.operations.get(str(name), {}).values()
        return render.operations(found, state, page_size, page_token)

    return page() if master is None else await committed(master, page)


@router.get("/{operation_id}", operation_id="getOperation")
async def get_operation(jobs: JobsOf, request: Request, operation_id: str, wait_s: WaitS = 0.0) -> Operation:
    """Answers at once, or when it has ended, at most `wait_s` later; `reason` says what it waits for. What
    was asked of a whole job outlives the job: the operation that deleted it can be read afterwards."""
    name = _named(jobs, request)
    if isinstance(jobs, ClusterMaster) and jobs.state.operation(str(name), operation_id) is not None:
        return await jobs.operation(str(name), operation_id, wait_s)
    master = jobs.find(name)
    return await OfJob(master).operation(master.keys.job, operation_id, wait_s)


def _named(jobs: JobsLed, request: Request) -> str | None:
    """The job of the path, or the only one; None: that of a master of one job."""
    named: str | None = request.path_params.get("job")
    return named or (jobs.only_job() if isinstance(jobs, ClusterMaster) else None)


checkpoints = APIRouter(prefix="/checkpoints", tags=["checkpoints"])


@checkpoints.post("", operation_id="createCheckpoint", status_code=202)
async def create_checkpoint(
    master: MasterOf, asking: Asking, asked: CreateCheckpoint | None = None
) -> Operation:
    """Save one of the next steps; training does not stop for it. A request that comes while one is being made
    gets the next one."""
    asked, operations = asked or CreateCheckpoint(), master.term.operations
    cause, limit_s = asked.cause or asking.by, asked.limit_s
    return await asking.begin(lambda once: operations.create_checkpoint(asking.key, cause, limit_s, once))


@checkpoints.get("", operation_id="listCheckpoints")
async def list_checkpoints(
    master: MasterOf, page_size: PageSize = 100, page_token: PageToken = ""
) -> CheckpointPage:
    """Checkpoints that are kept, the newest of the job's present history first."""
    return await committed(master, lambda: render.checkpoints(master.job, page_size, page_token))


@checkpoints.get("/{checkpoint_id}", operation_id="getCheckpoint")
async def get_checkpoint(master: MasterOf, checkpoint_id: str) -> CheckpointDetails:
    """With the details of its manifest."""
    return await answered(render.checkpoint_details(master, checkpoint_id))


@checkpoints.post("/{checkpoint_id}/verify", operation_id="verifyCheckpoint", status_code=202)
async def verify_checkpoint(master: MasterOf, asking: Asking, checkpoint_id: str) -> Operation:
    """Read every part and compare its checksum; the operation is FAILED if one is not as it was written."""
    operations = master.term.operations
    return await asking.begin(
        lambda once: operations.verify_checkpoint(asking.key, asking.by, checkpoint_id, once)
    )


@checkpoints.post("/{checkpoint_id}/restore", operation_id="restoreCheckpoint", status_code=202)
async def restore_checkpoint(master: MasterOf, asking: Asking, checkpoint_id: str) -> Operation:
    """The whole job goes back to that step and continues from there. The files are verified before anything
    is stopped."""
    cause, operations = f"restore {asking.by}", master.term.operations
    return await asking.begin(
        lambda once: operations.restore_checkpoint(asking.key, cause, checkpoint_id, once)
    )


resizes = APIRouter(tags=["resizes"])

Trainers = Annotated[int | None, Query(le=MAX_MEMBERS, description="left out: as many as now")]
Pservers = Annotated[int | None, Query(le=MAX_MEMBERS, description="left out: as many as now")]


@resizes.post("/resizes", operation_id="createResize", status_code=202)
async def create_resize(master: MasterOf, asking: Asking, asked: CreateResize) -> Operation:
    """Change the numbers of members while the job trains. What is left out stays as it is. `resize` of the
    operation tells how far it is, and getResize by the same id."""
    operations = master.term.operations
    numbers = asked.trainers, asked.pservers, asked.strategy
    key, cause = asking.key, asked.cause or asking.by
    return await asking.begin(
        lambda once: operations.create_resize(key, cause, *numbers, asked.limit_s, once)
    )


@resizes.get("/resizes", operation_id="listResizes")
async def list_resizes(master: MasterOf, page_size: PageSize = 100, page_token: PageToken = "") -> ResizePage:
    """Those that run and the last ones that ended, newest first."""
    return await committed(master, lambda: render.resizes(master.job, page_size, page_token))


@resizes.get("/resizes/{resize_id}", operation_id="getResize")
async def get_resize(master: MasterOf, resize_id: str, wait_s: WaitS = 0.0) -> ResizeView:
    """Answers at once, or when it has ended, at most `wait_s` later."""
    operations = master.term.operations
    await operations.wait(resize_id, wait_s)
    return await committed(master, lambda: render.resize(operations.get(resize_id)))


@resizes.post("/resizes/{resize_id}/cancel", operation_id="cancelResize")
async def cancel_resize(master: MasterOf, answering: AnsweringInJob, resize_id: str) -> ResizeView:
    """Groups of slots that have moved stay where they are; no others move. The job wants as many members as
    that needs."""
    call = partial(master.term.operations.cancel_resize, resize_id)
    return await answering.answer(ResizeView, call, render.resize)


@resizes.get("/resize-prediction", operation_id="predictResize")
async def predict_resize(
    master: MasterOf,
    trainers: Trainers = None,
    pservers: Pservers = None,
    strategy: Strategy = Strategy.LIVE,
) -> ResizePrediction:
    """What a resize to these numbers would move, from the layout alone. Nothing changes."""
    operations = master.term.operations
    return await committed(master, lambda: operations.predict_resize(trainers, pservers, strategy))

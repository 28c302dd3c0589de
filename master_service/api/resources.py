"""Answers of the REST API beside the records of shared/records: one class for a resource, one for a page of them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from shared.evaluations import Evaluation
from shared.events import EventRecord
from shared.records import JobResult, JobSpec, Mode, Record, Stage, TaskKind, UserFailure
from shared.records.job_spec import MAX_MEMBERS
from shared.records.operations import Operation, OperationState, Resize, Strategy
from shared.records.pauses import Losses


class Empty(Record):
    """Done."""


class ProblemPart(Record):
    """One value that is wrong: where it is and what is wrong with it."""

    location: str
    message: str


class Problem(Record):
    """RFC 9457 problem details. `code` is stable; `retryable`: the same request may succeed later."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str
    retryable: bool
    hint: str = ""
    request_id: str = ""
    details: dict[str, Any] = Field(default_factory=dict)
    errors: tuple[ProblemPart, ...] = ()


class JobProgress(Record):
    """`step`: how many steps are done. `records_*` over all epochs. `loss`: mean of the current (or last) epoch. Null where not known yet."""

    epoch: int
    epochs: int
    step: int | None = None
    loss: float | None = None
    records_done: int
    records_total: int
    records_per_s: float | None = None
    eta_s: float | None = None


class EvaluationProgress(Record):
    """Of the evaluations while the job trains. `settled`: so many are over. `running`, `step`: number and step of the one that is under way, with
    its tasks; null: none is. `last`: the last result, with the best one up to it."""

    settled: int
    running: int | None = None
    step: int | None = None
    tasks_done: int = 0
    tasks_total: int = 0
    last: Evaluation | None = None


class MemberCounts(Record):
    """How many there are, and should be."""

    trainers: int
    trainers_desired: int
    pservers: int
    pservers_desired: int


class MasterView(Record):
    """Who answers."""

    master_id: str
    url: str
    term: int


class JobView(Record):
    """`losses`: by parameter server, minibatches that its blocks never got. `stalled`: for whom a job waits that makes no progress,
    else empty. `phase`: WAITING, RUNNING, CHECKPOINTING, ROLLING_BACK, COMPLETED, FAILED; in a cluster also QUEUED, PAUSED,
    CANCELLED. `evaluation`: null if the job has no evaluate_every. `standing`: in a cluster, QUEUED, ACTIVE, PAUSED, COMPLETED, FAILED, CANCELLED."""

    job: str
    phase: str
    stage: Stage
    mode: Mode
    generation: int
    reason: str
    stalled: str = ""
    standing: str = ""
    failure: UserFailure | None = None
    progress: JobProgress
    evaluation: EvaluationProgress | None = None
    members: MemberCounts
    losses: Losses
    result: JobResult
    master: MasterView
    spec: JobSpec
    version: str = ""


class TaskView(Record):
    """`state`: TODO, PENDING, REQUEUED, DONE, DISCARDED. `silent_s`: since the attempt's last sign of life."""

    task_id: str
    kind: TaskKind
    state: str
    epoch: int
    stream: int
    index: int
    file: str = ""
    first: int = 0
    count: int = 0
    attempt: int = 0
    failures: int = 0
    trainer: str = ""
    cause: str = ""
    minibatches: int = 0
    silent_s: float | None = None
    remaining_s: float | None = None


class TaskPage(Record):
    """Tasks of one epoch."""

    tasks: tuple[TaskView, ...]
    next_page_token: str = ""


class MemberView(Record):
    """`lanes`: [first, last) of a trainer in synchronous training. `index`, `slots`: of a pserver, and how many slots it owns."""

    member_id: str
    kind: Literal["trainer", "pserver"]
    url: str
    incarnation: str
    host: str
    pid: int
    index: int | None = None
    slots: int | None = None
    lanes: tuple[int, int] | None = None
    has_parameters: bool | None = Field(
        default=None,
        description="Of a trainer of a collective job; one without them still fetches them. null: another strategy, or no trainer.",
    )
    tasks: tuple[str, ...] = ()


class MemberPage(Record):
    """Parameter servers, then trainers."""

    members: tuple[MemberView, ...]
    next_page_token: str = ""


class SuspectAnswer(Record):
    """`dead`: nothing listened at its address, its lease is revoked."""

    dead: bool


class CreateCheckpoint(Record):
    """`cause`: for people, why. `limit_s`: the operation fails if there is no checkpoint by then."""

    cause: str = Field(default="", max_length=200)
    limit_s: float = Field(default=600.0, gt=0, le=86400)


class CheckpointView(Record):
    """`state`: LATEST, KEPT (the job would go back to it if the newer ones were damaged), LEFT (of an older timeline: the
    job was restored to an older checkpoint). `kind`: base (whole), delta (of embedding tables only the rows that changed since the checkpoints it `builds_on`
    directly)."""

    checkpoint_id: str
    step: int
    timeline: int
    state: str
    kind: Literal["base", "delta"]
    builds_on: tuple[str, ...] = ()


class CheckpointDetails(CheckpointView):
    """A checkpoint with what its manifest says. `bases`: the whole checkpoints that a delta begins with (each parameter server decides for its own part), `deltas`:
    how many deltas of one part lead from there to this one, itself included."""

    epoch: int
    pservers: int
    size_bytes: int
    needed_bytes: int
    bases: tuple[str, ...] = ()
    deltas: int = 0
    write_time: str
    files: tuple[str, ...]


class CheckpointPage(Record):
    """Newest first."""

    checkpoints: tuple[CheckpointView, ...]
    next_page_token: str = ""


class CreateResize(Record):
    """Numbers from now on; null: as many as now. `strategy` restart: by a checkpoint that all parameter servers load. `limit_s`: then it
    ends, and what has moved stays where it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")  # a field with another name must not become a resize

    trainers: int | None = Field(default=None, le=MAX_MEMBERS)
    pservers: int | None = Field(default=None, le=MAX_MEMBERS)
    strategy: Strategy = Strategy.LIVE
    cause: str = Field(default="", max_length=200)
    limit_s: float = Field(default=600.0, gt=0, le=86400)


class ResizeView(Resize):
    """`state`, `reason`: of the operation, whose id this is. `groups`, `bytes`, `slots`: of what moves; `bytes_moved`: payloads that
    were sent. `longest_pause_s`: how long the pushes of a group had to wait at most."""

    resize_id: str
    state: OperationState
    reason: str = ""
    error_code: str = ""
    create_time: str = ""
    end_time: str = ""


class ResizePage(Record):
    """Newest first."""

    resizes: tuple[ResizeView, ...]
    next_page_token: str = ""


class OperationPage(Record):
    """Newest first."""

    operations: tuple[Operation, ...]
    next_page_token: str = ""


class EventPage(Record):
    """`next_after`: the `after` of the next request. `oldest`, `newest`: ids of the events that are kept."""

    events: tuple[EventRecord, ...]
    next_after: int
    oldest: int
    newest: int


class LogView(Record):
    """The log of a member, or of one epoch of it."""

    log: str
    bytes: int
    write_time: str


class LogPage(Record):
    """Logs on the master's host, by name."""

    logs: tuple[LogView, ...]
    next_page_token: str = ""


class LogLine(Record):
    """A line that a member wrote."""

    time: str
    text: str


class LogLines(Record):
    """Part of a log. `next_after`: the `after` that leads to what was written since; `next_before`: the `before` that leads to the
    lines before these."""

    log: str
    lines: tuple[LogLine, ...]
    next_after: int
    next_before: int


class MetricPoint(Record):
    """One step (or epoch): mean loss over its records. `skipped`: records left out, because their loss or gradient was not
    finite (`on_nonfinite: skip`)."""

    number: int
    loss: float | None
    records: int
    skipped: int = 0


class MetricPage(Record):
    """Points with a number above `after`, oldest first."""

    metric: str
    points: tuple[MetricPoint, ...]
    next_page_token: str = ""


class SeriesSummary(Record):
    """A metric by step. `points`: how many are kept; each is of `width` steps."""

    name: str
    first_step: int
    last_step: int
    points: int
    width: int


class SeriesPage(Record):
    """In the order of their names."""

    series: tuple[SeriesSummary, ...]
    next_page_token: str = ""


class SeriesPoint(Record):
    """The steps from `step` to `last_step`: the mean by `weight` (records, or how many values were reported), the smallest and the
    largest reported value. `epoch`: whose steps they are, if epochs were asked for."""

    step: int
    last_step: int
    epoch: int | None = None
    mean: float
    least: float
    most: float
    weight: float


class SeriesPoints(Record):
    """Of one metric, by step or by epoch."""

    name: str
    points: tuple[SeriesPoint, ...]


class EvaluationPage(Record):
    """The newest first."""

    evaluations: tuple[Evaluation, ...]
    next_page_token: str = ""


class TokenAccess(Record):
    """`role`: admin, member or viewer; admin where the service was started without tokens."""

    role: str


class Version(Record):
    """Of the program and of its API."""

    name: str
    version: str
    api: str


class Health(Record):
    """The process answers."""

    status: str

"""What the REST API answers and takes about one job, beside the records of protocol/records: one class for a
resource, one for a page of them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from trireme_shared.protocol.evaluations import Evaluation
from trireme_shared.protocol.events import EventRecord
from trireme_shared.protocol.records import JobResult, Mode, Record, Stage, TaskKind, UserFailure
from trireme_shared.protocol.records.cluster import Scheduling
from trireme_shared.protocol.records.job import Losses
from trireme_shared.protocol.records.job_choices import MAX_MEMBERS, AcceptedChange
from trireme_shared.protocol.records.job_spec import JobSettings
from trireme_shared.protocol.records.operations import Operation, OperationState, Resize, Strategy
from trireme_shared.protocol.records.record import UrlText


class Empty(Record):
    """Done."""


class ProblemPart(Record):
    """One value that is wrong: where it is and what is wrong with it."""

    location: str = Field(description="Where the value is: `body.settings.epochs`, `query.page_size`.")
    message: str = Field(description="What is wrong with the value.")


class Problem(Record):
    """RFC 9457 problem details."""

    type: str = Field(
        default="about:blank", description="URI of the kind of problem; about:blank: the code says it."
    )
    title: str = Field(description="The status in words.")
    status: int = Field(description="The status of the answer.")
    detail: str = Field(description="What went wrong, with the values, for people.")
    code: str = Field(description="Stable name of the problem, for programs; there may be new ones.")
    retryable: bool = Field(description="The same request may succeed later.")
    hint: str = Field(default="", description="What to do; empty: nothing is known to help.")
    request_id: str = Field(
        default="", description="Id of the request, as in X-Request-Id and in the master's log."
    )
    details: dict[str, Any] = Field(default_factory=dict, description="Values of the problem, for programs.")
    errors: tuple[ProblemPart, ...] = Field(default=(), description="Each value that is wrong.")


class JobProgress(Record):
    """`step`: how many steps are done. `records_*` over all epochs. `loss`: mean of the current (or last)
    epoch. Null where not known yet."""

    epoch: int
    epochs: int
    step: int | None = None
    loss: float | None = None
    records_done: int
    records_total: int
    records_per_s: float | None = Field(
        default=None, description="Records per second of late; null: not known."
    )
    eta_s: float | None = Field(
        default=None, description="Seconds until the end of the last epoch at this speed; null: not known."
    )


class EvaluationProgress(Record):
    """How far the evaluations are that are done while the job trains."""

    settled: int = Field(description="So many evaluations are over.")
    running: int | None = Field(
        default=None, description="Number of the evaluation that is under way; null: none is."
    )
    step: int | None = None
    tasks_done: int = Field(default=0, description="How many of its tasks are done.")
    tasks_total: int = Field(default=0, description="How many tasks it has.")
    last: Evaluation | None = Field(
        default=None, description="The last evaluation that is over; null: none is."
    )


class MemberCounts(Record):
    """How many are registered as the job's members, and should be: an ACTIVE job of a cluster as many as it
    has places, another one as many as it may get."""

    trainers: int
    trainers_desired: int = Field(description="Number of trainers that there should be.")
    pservers: int
    pservers_desired: int = Field(description="Number of parameter servers that there should be.")


class MasterView(Record):
    """Who answers."""

    master_id: str = Field(description="Id of the master.")
    url: str
    term: int = Field(description="Number of the master's lock; a later master has a higher one.")


class JobView(Record):
    """One job: where it is, how far it is, who works for it, and what it was asked to do. In a list, what
    only getJob tells is null: `stage`, `generation`, `evaluation`, `losses`, `result`, `settings`,
    `history`; `failure` has no traceback there."""

    job: str
    state: str = Field(
        description="Where the job is: WAITING, RUNNING, CHECKPOINTING, ROLLING_BACK, COMPLETED, FAILED; in "
        "a cluster also QUEUED, STARTING (nobody leads it yet), PAUSED, CANCELLED, UNREADABLE. There may "
        "be new ones."
    )
    phase: str = Field(
        description="What its master does, or did last if nobody leads it: `state` without STARTING."
    )
    standing: str = ""
    reason: str
    stalled: str = Field(
        default="",
        description="Whom a job without progress waits for, as a sentence; empty: it makes progress.",
    )
    wanted: str = Field(default="run", description="What was asked for last: run, pause, cancel or delete.")
    mode: Mode
    stage: Stage | None = None
    generation: int | None = Field(
        default=None, description="Number of the membership; it grows at every join and death."
    )
    failure: UserFailure | None = Field(
        default=None,
        description="The exception that ended the job, or the last one; null: there was none. A list has the "
        "first 200 characters of its message.",
    )
    progress: JobProgress = Field(
        description="How far training is; `records_total` is 0 while nobody knows it."
    )
    metrics: dict[str, float] = Field(
        default_factory=dict,
        description="The newest results of its evaluations, by name, the first 4: of the one after training, "
        "else of the last one while training; empty: none is known.",
    )
    evaluation: EvaluationProgress | None = Field(
        default=None, description="Evaluations while the job trains; null: the job has no evaluate_every."
    )
    members: MemberCounts = Field(description="How many members there are and should be.")
    losses: Losses | None = None
    result: JobResult | None = Field(default=None, description="Filled at the end of the job.")
    master: MasterView = Field(description="The master that answers.")
    scheduling: Scheduling | None = Field(
        default=None, description="What the job may have of the pool; null: it is in no cluster."
    )
    starts: int = Field(default=0, description="How often its cluster has started the job.")
    settings: JobSettings | None = Field(
        default=None, description="The job's settings, as createJob takes them."
    )
    history: tuple[AcceptedChange, ...] | None = Field(
        default=None,
        description="The newest changes of hyperparameters that the user has accepted between two runs, the "
        "newest last; `settings` have the values after them.",
    )
    script: UrlText
    storage: UrlText = Field(description="Path or URL where the job's files go.")
    sources: dict[str, str] = Field(default_factory=dict)
    source_digest: str = ""
    create_time: str = ""
    start_time: str = ""
    end_time: str = ""
    version: str = Field(
        default="",
        description="What users and the leader have decided, as a digest; with quotes around it, it is what "
        "If-Match takes. Empty: a job that is no cluster's.",
    )


class JobPage(Record):
    """In the order of their submission."""

    jobs: tuple[JobView, ...] = Field(description="The jobs of this page, in the order of their submission.")
    next_page_token: str = ""


class TaskView(Record):
    """One task: a range of records, and how far it is."""

    task_id: str
    kind: TaskKind
    state: str = Field(description="TODO, PENDING, REQUEUED, DONE or DISCARDED.")
    epoch: int
    stream: int
    index: int
    file: str = ""
    first: int = 0
    count: int = 0
    attempt: int = Field(default=0, description="How often the task was given out.")
    failures: int = 0
    trainer: str = ""
    cause: str = Field(
        default="", description="Why the task was queued again or discarded; empty: it was not."
    )
    minibatches: int = 0
    silent_s: float | None = Field(
        default=None, description="Seconds since the attempt's last sign of life; null: nobody works on it."
    )
    remaining_s: float | None = Field(
        default=None, description="Seconds until the attempt's deadline; null: nobody works on it."
    )


class TaskPage(Record):
    """Tasks of one epoch."""

    tasks: tuple[TaskView, ...] = Field(description="The tasks of this page.")
    next_page_token: str = ""


class MemberView(Record):
    """A trainer or a parameter server."""

    member_id: str
    kind: Literal["trainer", "pserver"]
    url: str
    incarnation: str = Field(description="Id of the process; a restarted member has another one.")
    host: str
    pid: int = Field(description="Id of the process on its host.")
    index: int | None = Field(
        default=None, description="Place of a parameter server, from 0; null: of a trainer."
    )
    slots: int | None = Field(
        default=None,
        description="How many slots a parameter server owns; null: of a trainer, or not known yet.",
    )
    lanes: tuple[int, int] | None = Field(
        default=None, description="First lane of a trainer, and the one after its last; null: none."
    )
    has_parameters: bool | None = Field(
        default=None,
        description="Of a trainer of a collective job; one without them still fetches them. null: another "
        "strategy, or no trainer.",
    )
    tasks: tuple[str, ...] = Field(default=(), description="Ids of the tasks that a trainer works on.")
    trireme_version: str = Field(
        default="", description="Version of Trireme that the member runs; empty: it does not say."
    )


class MemberPage(Record):
    """Parameter servers, then trainers."""

    members: tuple[MemberView, ...] = Field(description="The members of this page.")
    next_page_token: str = ""


class SuspectAnswer(Record):
    """What the master found of a member that another one suspects."""

    dead: bool = Field(description="Nothing listened at the member's address, so its lease was revoked.")


class CreateCheckpoint(Record):
    """`cause`: for people, why. `limit_s`: the operation fails if there is no checkpoint by then."""

    cause: str = Field(default="", max_length=200)
    limit_s: float = Field(default=600.0, gt=0, le=86400)


class CheckpointView(Record):
    """A checkpoint that can be restored."""

    checkpoint_id: str
    step: int
    timeline: int
    state: str = Field(
        description="LATEST, KEPT (used if newer ones are damaged), LEFT (of a history that was left: the "
        "job was restored to an older checkpoint)."
    )
    kind: Literal["base", "delta"] = Field(
        description="base: whole; delta: of embedding tables only rows that changed."
    )
    builds_on: tuple[str, ...] = Field(default=(), description="Checkpoints that a delta builds on directly.")


class CheckpointDetails(CheckpointView):
    """A checkpoint with what its manifest says."""

    epoch: int
    pservers: int
    size_bytes: int = Field(description="Bytes of all its files.")
    needed_bytes: int = Field(description="Bytes of its files and of all that it builds on.")
    bases: tuple[str, ...] = Field(
        default=(),
        description="Whole checkpoints that a delta begins with: each parameter server decides for its own "
        "part.",
    )
    deltas: int = Field(
        default=0, description="How many deltas follow the base, this one included; 0: it is whole."
    )
    write_time: str = Field(description="When it was written, RFC 3339.")
    files: tuple[str, ...] = Field(description="URLs of the checkpoint's files.")


class CheckpointPage(Record):
    """Newest first."""

    checkpoints: tuple[CheckpointView, ...] = Field(description="The checkpoints of this page.")
    next_page_token: str = ""


class CreateResize(Record):
    """Numbers from now on; null: as many as now. `strategy` restart: by a checkpoint that all parameter
    servers load. `limit_s`: then it ends, and what has moved stays where it is."""

    # a field with another name must not become a resize
    model_config = ConfigDict(frozen=True, extra="forbid")

    trainers: int | None = Field(
        default=None, le=MAX_MEMBERS, description="Number of trainers from now on; null: as many as now."
    )
    pservers: int | None = Field(
        default=None,
        le=MAX_MEMBERS,
        description="Number of parameter servers from now on; null: as many as now.",
    )
    strategy: Strategy = Strategy.LIVE
    cause: str = Field(default="", max_length=200)
    limit_s: float = Field(default=600.0, gt=0, le=86400)


class ResizeView(Resize):
    """`state`, `reason`: of the operation, whose id this is. `groups`, `bytes`, `slots`: of what moves;
    `bytes_moved`: payloads that were sent. `longest_pause_s`: how long the pushes of a group had to wait at
    most."""

    resize_id: str = Field(description="Id of the resize, and of its operation.")
    state: OperationState
    reason: str = ""
    error_code: str = ""
    create_time: str = ""
    end_time: str = ""


class ResizePage(Record):
    """Newest first."""

    resizes: tuple[ResizeView, ...] = Field(description="The resizes of this page, newest first.")
    next_page_token: str = ""


class OperationPage(Record):
    """Newest first."""

    operations: tuple[Operation, ...] = Field(description="The operations of this page, newest first.")
    next_page_token: str = ""


class EventPage(Record):
    """Events, oldest first."""

    events: tuple[EventRecord, ...] = Field(description="The events of this page, oldest first.")
    next_after: int = Field(description="The `after` of the next request.")
    oldest: int = Field(description="event_id of the oldest event that is kept.")
    newest: int = Field(description="event_id of the newest event that is kept.")


class LogView(Record):
    """The log of a member, or of one epoch of it."""

    log: str
    bytes: int = Field(description="Size of the log.")
    write_time: str = Field(description="When something was written last, RFC 3339.")


class LogPage(Record):
    """Logs on the master's host, by name."""

    logs: tuple[LogView, ...] = Field(description="The logs of this page.")
    next_page_token: str = ""


class LogLine(Record):
    """A line that a member wrote."""

    time: str = Field(
        description="When it was written, RFC 3339; of what a script printed: when the member wrote the line "
        "before it. Empty: not known."
    )
    text: str = Field(description="The line; what is above 64 KiB is cut.")


class LogLines(Record):
    """Part of a log."""

    log: str
    lines: tuple[LogLine, ...] = Field(description="The lines, oldest first.")
    next_after: int = Field(
        description="`after` of the request for what is written next: a place in the log."
    )
    next_before: int = Field(
        description="`before` of the request for the lines before these; 0: there are none."
    )


class MetricPoint(Record):
    """One step (or epoch): mean loss over its records. `skipped`: records left out, because their loss or
    gradient was not finite (`on_nonfinite: skip`)."""

    number: int
    loss: float | None
    records: int
    skipped: int = 0


class MetricPage(Record):
    """Points with a number above `after`, oldest first."""

    metric: str = Field(description="Name of the series.")
    points: tuple[MetricPoint, ...]
    next_page_token: str = ""


class SeriesSummary(Record):
    """A metric by step."""

    name: str
    first_step: int = Field(description="The first step that it is about.")
    last_step: int
    points: int = Field(description="Number of points that are kept.")
    width: int = Field(description="Number of steps that share a point.")


class SeriesPage(Record):
    """In the order of their names."""

    series: tuple[SeriesSummary, ...] = Field(description="The metrics of this page, by name.")
    next_page_token: str = ""


class SeriesPoint(Record):
    """What was reported in the steps from `step` to `last_step`."""

    step: int
    last_step: int
    epoch: int | None = Field(
        default=None, description="Epoch of these steps, from 0; null: points are by step."
    )
    mean: float = Field(description="Mean of the reported values, by weight.")
    least: float
    most: float
    weight: float = Field(description="Number of records, or of reported values.")


class SeriesPoints(Record):
    """Of one metric, by step or by epoch."""

    name: str
    points: tuple[SeriesPoint, ...]


class EvaluationPage(Record):
    """The newest first."""

    evaluations: tuple[Evaluation, ...] = Field(description="The evaluations of this page, the newest first.")
    next_page_token: str = ""


class TokenAccess(Record):
    """What the token of the request may do."""

    role: str = Field(
        description="admin, member or viewer; admin where the service was started without tokens."
    )


class LoginCode(Record):
    """A code that a browser exchanges for the token of the request, once."""

    code: str = Field(description="Part of an address of the dashboard: `/#/login/CODE`.")
    valid_s: float = Field(description="It is refused so many seconds later.")


class Login(Record):
    """What a login code was exchanged for."""

    token: str = Field(
        description="The token that the code was made with; empty where the service asks for none."
    )


class Version(Record):
    """Of the program and of its API."""

    name: str
    version: str = Field(description="Version of Trireme.")
    api: str = Field(description="Version of the API, the first part of its paths.")
    state_schema: int = Field(
        default=0, description="Version of the form in which etcd holds jobs and clusters."
    )
    members: dict[str, int] = Field(
        default_factory=dict,
        description="How many trainers and parameter servers of the jobs that this master leads run each "
        "version of Trireme; an empty version: they do not say.",
    )
    places: dict[str, int] = Field(
        default_factory=dict,
        description="The same of the pool's places, by the version of their host agents.",
    )


class Health(Record):
    """The process answers."""

    status: str = Field(description="ok.")

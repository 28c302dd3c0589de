"""Answers and requests of the REST API about jobs of a cluster and its pool."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from master_service.api.resources import JobProgress
from master_service.trackers.made import check as check_trackers
from shared.errors import InvalidArgument
from shared.records import JobSpec, Mode, Record
from shared.records.cluster import ClusterJob, JobSchedule, Kind, Scheduling, Source, Standing, TaskState
from shared.records.job_spec import JOB_NAME, JobSettings
from shared.runtime import clock
from shared.storage import files


class CreateJob(Record):
    """`source`: the script itself, or `script`: a path or URL that every member can read. `settings`: as in trireme.Config, with the
    dataset. `storage`: where its files go (default: below the cluster's storage)."""

    keeps_nulls: ClassVar[bool] = True

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=JOB_NAME)
    settings: JobSettings
    source: Source | None = None
    script: str = Field(default="", max_length=2000)
    storage: str = Field(default="", max_length=2000)
    scheduling: Scheduling = Field(default_factory=Scheduling)

    @model_validator(mode="after")
    def _one_script(self) -> CreateJob:
        if (self.source is None) is not bool(self.script):
            msg = "give either source (the script's text) or script (a path or URL that members can read)"
            raise ValueError(msg)
        return self

    def to_job(self, storage_url: str, request: str) -> ClusterJob:
        """`storage_url`: the cluster's. Raises InvalidArgument."""
        if self.settings.dispatch != "master":
            raise InvalidArgument("dispatch etcd is for jobs without a master; a cluster's jobs have one")
        check_trackers(self.settings.trackers)
        spec = JobSpec(
            job=self.name,
            script=self.source.script if self.source else self.script,
            storage=self.storage or files.join(storage_url, self.name),
            **{name: getattr(self.settings, name) for name in JobSettings.model_fields},
        )
        return ClusterJob(
            job=self.name,
            spec=spec,
            scheduling=self.scheduling,
            source_digest=self.source.digest if self.source else "",
            request=request,
            create_time=clock.timestamp(),
        )


class CreateSchedule(CreateJob):
    """A job as in createJob, which begins at each time of `cron` (minute, hour, day of month, month, day of week) in `time_zone`.
    `concurrency`: if the job before has not ended, this time is left out (forbid), or that job is cancelled (replace)."""

    cron: str = Field(max_length=200)
    time_zone: str = Field(default="UTC", max_length=64)
    concurrency: Literal["forbid", "replace"] = "forbid"

    def to_schedule(self, storage_url: str, request: str) -> JobSchedule:
        """`storage_url`: the cluster's. Raises InvalidArgument."""
        job = self.to_job(storage_url, request)
        return JobSchedule(
            name=self.name,
            cron=self.cron,
            time_zone=self.time_zone,
            concurrency=self.concurrency,
            spec=job.spec.model_copy(update={"storage": self.storage or storage_url}),
            scheduling=job.scheduling,
            source_digest=job.source_digest,
            request=request,
        )


class ScheduleView(Record):
    """`next_time`: when its next job is created. `reason`: what became of `last_time`."""

    name: str
    cron: str
    time_zone: str
    concurrency: str
    next_time: str
    last_time: str
    last_job: str
    reason: str
    scheduling: Scheduling
    source_digest: str
    create_time: str
    version: str = ""


class SchedulePage(Record):
    """In the order of their names."""

    schedules: tuple[ScheduleView, ...]
    next_page_token: str = ""


class MembersHeld(Record):
    """How many places of each kind a job has, and how many of them have a process that is registered as its member."""

    trainers: int
    trainers_running: int
    pservers: int
    pservers_running: int


class ClusterJobView(Record):
    """`state`: QUEUED, PAUSED, COMPLETED, FAILED, CANCELLED, or the phase of an ACTIVE job (WAITING, RUNNING, ...). `wanted`: run,
    pause or cancel, what was asked for last. `progress`: of an ACTIVE job that is led."""

    job: str
    state: str
    standing: Standing
    reason: str
    wanted: str
    mode: Mode
    scheduling: Scheduling
    pservers: int
    members: MembersHeld
    starts: int
    progress: JobProgress | None = None
    source_digest: str = ""
    create_time: str = ""
    start_time: str = ""
    end_time: str = ""
    version: str = ""


class ClusterJobPage(Record):
    """In the order of their submission."""

    jobs: tuple[ClusterJobView, ...]
    next_page_token: str = ""


class JobTaskView(Record):
    """A pre- or post-task of a job: `name` is `pre-0`, ... `state`: WAITING, RUNNING, SUCCEEDED, FAILED, CANCELLED; WAITING, too, if it
    may never run. `attempt`: how often it was started; `failures`: how often it ended badly; `lost`: how often its member was
    lost. `output`: the end of what the last attempt that ended printed."""

    name: str
    command: str
    function: str
    when: str
    timeout_s: float
    retries: int
    state: TaskState
    attempt: int
    failures: int
    lost: int
    member_id: str
    host: str
    exit_code: int | None
    reason: str
    output: str
    start_time: str
    end_time: str


class JobTaskPage(Record):
    """All of one job: there are few."""

    job_tasks: tuple[JobTaskView, ...]


class JobSource(Record):
    """`digest`: SHA-256 of all texts. `modules`: those beside the script that were sent with it, path -> text."""

    digest: str
    file_name: str
    text: str
    modules: dict[str, str] = Field(default_factory=dict)


class PoolMemberView(Record):
    """`state`: idle, assigned (its process does not run yet), running, leaving (its process of an earlier job still runs), draining
    (it gets no work, and what it runs leaves), drained (nothing runs there, and it gets no work)."""

    member_id: str
    kind: Kind
    host: str
    agent: str
    state: str
    job: str = ""
    task: str = ""
    trouble: str = ""
    cores: int = 1
    memory_bytes: int = 0
    device: str = ""
    version: str = ""


class PoolMemberPage(Record):
    """By kind and id."""

    members: tuple[PoolMemberView, ...]
    next_page_token: str = ""


class PoolKind(Record):
    """Members of one kind. `draining`: those that get no work, drained ones too. `needed`: so many that every job that may run now can start, and has what a resize asked for."""

    members: int
    idle: int
    draining: int
    needed: int


class PoolView(Record):
    """How many members there are, and how many the jobs need."""

    trainers: PoolKind
    pservers: PoolKind

"""What the REST API answers and takes about jobs of a cluster and its pool."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from trireme_shared.protocol.records import Record
from trireme_shared.protocol.records.cluster import Kind, Scheduling, Source, TaskState
from trireme_shared.protocol.records.job_choices import JobName
from trireme_shared.protocol.records.job_spec import JobSettings
from trireme_shared.protocol.records.record import UrlText


class CreateJob(Record):
    """`source`: the script itself, or `script`: a path or URL that every member can read. `settings`: as in
    trireme.Config, with the dataset. `storage`: where its files go (default: below the cluster's storage)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: JobName
    settings: JobSettings = Field(description="The job's settings, as in trireme.Config.")
    source: Source | None = Field(default=None, description="The script itself; null if `script` names it.")
    script: UrlText = Field(
        default="", max_length=2000, description="Path or URL of the script, which every member can read."
    )
    storage: UrlText = Field(default="", max_length=2000)
    scheduling: Scheduling = Field(default_factory=Scheduling)

    @model_validator(mode="after")
    def _one_script(self) -> CreateJob:
        if (self.source is None) is not bool(self.script):
            msg = "give either source (the script's text) or script (a path or URL that members can read)"
            raise ValueError(msg)
        return self


class CreateSchedule(CreateJob):
    """A job as in createJob, which begins at each time of `cron` (minute, hour, day of month, month, day of
    week) in `time_zone`. `concurrency`: if the job before has not ended, this time is left out (forbid), or
    that job is cancelled (replace)."""

    cron: str = Field(max_length=200)
    time_zone: str = Field(default="UTC", max_length=64)
    concurrency: Literal["forbid", "replace"] = "forbid"


class ScheduleView(Record):
    """Jobs that begin again and again."""

    name: str
    cron: str
    time_zone: str
    concurrency: str
    next_time: str = Field(description="When its next job is created, RFC 3339.")
    last_time: str = Field(description="The last time that was decided about, RFC 3339; empty: none was.")
    last_job: str = Field(description="Name of the last job that was created; empty: none was.")
    reason: str
    scheduling: Scheduling
    source_digest: str
    create_time: str
    version: str = ""


class SchedulePage(Record):
    """In the order of their names."""

    schedules: tuple[ScheduleView, ...] = Field(description="The schedules of this page, by name.")
    next_page_token: str = ""


class JobTaskView(Record):
    """A pre- or post-task of a job, whose name is `pre-0`, ... It is WAITING, too, if it may never run."""

    name: str
    command: str
    function: str
    when: str
    timeout_s: float
    retries: int
    state: TaskState
    attempt: int = Field(description="How often the command was started.")
    failures: int
    lost: int = Field(description="How often the member that ran it was lost.")
    member_id: str
    host: str
    exit_code: int | None = Field(description="Exit code of the last attempt; null: none has ended.")
    reason: str
    output: str = Field(description="The end of what the last attempt that ended printed.")
    start_time: str
    end_time: str


class JobTaskPage(Record):
    """All of one job: there are few."""

    job_tasks: tuple[JobTaskView, ...] = Field(description="Pre-tasks, then post-tasks, in their order.")


class JobSource(Record):
    """The script that was sent with a job, and its modules."""

    digest: str = Field(description="SHA-256 of all texts, in hex.")
    file_name: str
    text: str
    modules: dict[str, str] = Field(default_factory=dict)


class PoolMemberView(Record):
    """A place for a trainer or a parameter server."""

    member_id: str
    kind: Kind
    host: str
    agent: str = Field(description="Id of the host agent that offers the place.")
    state: str = Field(
        description="idle, assigned (its process does not run yet), running, leaving (its process of an "
        "earlier job still runs), draining (it gets no work, and what it runs leaves) or drained "
        "(nothing runs there, and it gets no work)."
    )
    job: str = Field(default="", description="Name of the job that it works for; empty: none.")
    task: str = Field(default="", description="Name of the pre- or post-task that it runs; empty: none.")
    trouble: str = Field(
        default="",
        description="Why its process does not run, as a sentence; empty: it runs, or is not wanted.",
    )
    cores: int = Field(default=1, description="Number of processor cores that the place has.")
    memory_bytes: int = Field(default=0, description="Bytes of memory that the place has.")
    device: str = Field(default="", description="What the place can compute on.")
    trireme_version: str = Field(
        default="", description="Version of Trireme that the host agent runs; empty: it does not say."
    )
    version: str = ""


class PoolMemberPage(Record):
    """By kind and id."""

    members: tuple[PoolMemberView, ...] = Field(description="The places of this page.")
    next_page_token: str = ""


class PoolKind(Record):
    """Members of one kind."""

    members: int = Field(description="Number of members.")
    idle: int = Field(description="Number of members without work.")
    draining: int = Field(description="Number of members that get no work because a user drains them.")
    needed: int = Field(description="So many members let every job start that may run now.")


class PoolView(Record):
    """How many members there are, and how many the jobs need."""

    trainers: PoolKind = Field(description="The places for trainers.")
    pservers: PoolKind = Field(description="The places for parameter servers.")

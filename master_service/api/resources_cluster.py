"""Answers and requests of the REST API about jobs of a cluster and its pool."""

from __future__ import annotations

from pydantic import ConfigDict, Field, model_validator

from master_service.api.resources import JobProgress
from shared.errors import InvalidArgument
from shared.records import JobSpec, Mode, Record
from shared.records.cluster import ClusterJob, Kind, Scheduling, Source, Standing
from shared.records.job_spec import JOB_NAME, JobSettings
from shared.runtime import clock
from shared.storage import files


class CreateJob(Record):
    """`source`: the script itself, or `script`: a path or URL that every member can read. `settings`: as in trireme.Config, with the
    dataset. `storage`: where its files go (default: below the cluster's storage)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=JOB_NAME)
    settings: JobSettings
    source: Source | None = None
    script: str = Field(default="", max_length=2000)
    storage: str = Field(default="", max_length=2000)
    scheduling: Scheduling = Scheduling()

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


class MembersHeld(Record):
    """How many places of each kind a job has, and how many of them run a process for it now."""

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


class ClusterJobPage(Record):
    jobs: tuple[ClusterJobView, ...]
    next_page_token: str = ""


class JobSource(Record):
    """`digest`: SHA-256 of the text."""

    digest: str
    file_name: str
    text: str


class PoolMemberView(Record):
    """`state`: idle, assigned (its process does not run yet), running, leaving (its process of an earlier job still runs), draining."""

    member_id: str
    kind: Kind
    host: str
    agent: str
    state: str
    job: str = ""
    trouble: str = ""
    cores: int = 1
    memory_bytes: int = 0
    device: str = ""


class PoolMemberPage(Record):
    members: tuple[PoolMemberView, ...]
    next_page_token: str = ""

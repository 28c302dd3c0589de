"""A cluster: many jobs under one leader, and the pool of members that it assigns to them. JSON in etcd and on
REST."""

from __future__ import annotations

import hashlib
import re
from enum import StrEnum
from functools import cached_property
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from trireme_shared.protocol.records.job_spec import JobSpec
from trireme_shared.protocol.records.record import Id, Message, Name, Record
from trireme_shared.protocol.records.tasks import UserFailure
from trireme_shared.protocol.times import instant

SOURCE_BYTES = 512 << 10
SOURCE_SCHEME = "source:"
_FILE_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}\.py"
_MODULE_PATH = r"^([A-Za-z_][A-Za-z0-9_]{0,120}/){0,16}[A-Za-z_][A-Za-z0-9_]{0,120}\.py$"
_STORED = re.compile(rf"{SOURCE_SCHEME}([0-9a-f]{{64}})/({_FILE_NAME})")


class Standing(StrEnum):
    """Where a job is in its cluster. What an ACTIVE job does is the phase of its JobState.

    QUEUED ─ members can be had ─► ACTIVE ─► COMPLETED | FAILED
      ▲ └──────── pause ─► PAUSED ◄─┘ │
      └── resume, preempted ──────────┘        cancel: any of the first three ─► CANCELLED

    UNREADABLE, which etcd never holds: the leader's version cannot read the job, and leaves it alone.
    """

    QUEUED = "QUEUED"
    ACTIVE = "ACTIVE"
    PAUSED = "PAUSED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    UNREADABLE = "UNREADABLE"

    @property
    def final(self) -> bool:
        return self in {Standing.COMPLETED, Standing.FAILED, Standing.CANCELLED}


class Scheduling(Record):
    """What a job may have of the pool. `max_trainers` None: as many as lanes (synchronous) or as there are.
    `preemptible`: jobs of a higher priority may take it below `min_trainers`; then it goes back to QUEUED
    with a checkpoint. `after`: jobs that must be COMPLETED first. `not_before_time`: RFC 3339."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    min_trainers: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="It starts with no fewer trainers, and keeps them unless it is preempted.",
    )
    max_trainers: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="It gets at most so many trainers; null: as many as are of use.",
    )
    priority: int = Field(
        default=50, ge=0, le=100, description="Jobs with a higher number get members first."
    )
    weight: float = Field(default=1.0, gt=0, le=1000)
    preemptible: bool = Field(
        default=False,
        description="Jobs of a higher priority may take it below min_trainers; then it is QUEUED again with "
        "a checkpoint.",
    )
    after: tuple[Id, ...] = Field(
        default=(), max_length=32, description="Names of jobs that must be COMPLETED before this one starts."
    )
    not_before_time: str = Field(
        default="", max_length=64, description="It starts no earlier, RFC 3339; empty: at once."
    )

    @field_validator("not_before_time")
    @classmethod
    def _has_a_zone(cls, value: str) -> str:
        if value:
            instant(value)
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Scheduling:
        if self.max_trainers is not None and self.max_trainers < self.min_trainers:
            msg = f"max_trainers {self.max_trainers} is less than min_trainers {self.min_trainers}"
            raise ValueError(msg)
        return self


class Source(Record):
    """A job's script, and the modules beside it that it imports: path below the script's folder -> text.
    Stored once under its digest; a spec names it as `source:<digest>/<file_name>`. At most SOURCE_BYTES in
    all."""

    file_name: str = Field(pattern=f"^{_FILE_NAME}$")
    text: str = Field(max_length=SOURCE_BYTES)
    modules: dict[Annotated[str, Field(pattern=_MODULE_PATH, max_length=500)], str] = Field(
        default_factory=dict, max_length=1000
    )

    @model_validator(mode="after")
    def _bounded(self) -> Source:
        size = sum(len(text.encode()) for text in (self.text, *self.modules.values()))
        if size > SOURCE_BYTES:
            msg = (
                f"the script and its {len(self.modules)} modules have {size} bytes, at most "
                f"{SOURCE_BYTES} are taken; install the modules on the members"
            )
            raise ValueError(msg)
        if self.file_name in self.modules:
            msg = f"{self.file_name} is the script and a module, too"
            raise ValueError(msg)
        return self

    @property
    def digest(self) -> str:
        """SHA-256 of the texts, in hex: jobs with the same ones share them, whatever they call the script."""
        found = hashlib.sha256(self.text.encode())
        for path in sorted(self.modules):
            found.update(f"\0{path}\0".encode())
            found.update(self.modules[path].encode())
        return found.hexdigest()

    @property
    def script(self) -> str:
        """What the job's spec has in `script`."""
        return f"{SOURCE_SCHEME}{self.digest}/{self.file_name}"


def stored_source(script: str) -> tuple[str, str] | None:
    """(digest, file name) that a spec's `script` names; None: it is a path or a URL. Raises ValueError if it
    looks like a source and is none."""
    if not script.startswith(SOURCE_SCHEME):
        return None
    found = _STORED.fullmatch(script)
    if found is None:
        msg = f"script {script!r} names no source: it is {SOURCE_SCHEME}<SHA-256 in hex>/<file name>.py"
        raise ValueError(msg)
    return found[1], found[2]


Wanted = Literal["run", "pause", "cancel", "delete"]  # what the users of a job asked for last


class Outcome(Record):
    """How far a job was when it was led last. `records_total`: 0 if nobody knew it."""

    epoch: int = 0
    step: int | None = None
    #: Mean of the epoch under way, or of the last one; None: not known, or not finite.
    loss: float | None = None
    records_done: int = 0
    records_total: int = 0
    #: As a list of jobs has them.
    metrics: dict[str, float] = Field(default_factory=dict)
    failure: UserFailure | None = None


class ClusterJob(Record):
    """One job of a cluster. `epoch` counts its starts: assignments of an older one are no more. `wanted`:
    what its users asked for last; `delete`: its files are being deleted, then its keys. `reason`: why it is
    where it is, as a sentence. `trainers`, `pservers`: how many it may have now by a resize (None: as
    `max_trainers` and the spec say). `preempted_by`: the job that it gives its members to; it is stopped and
    then QUEUED again. `outcome`: of its last term that has ended; None: none has."""

    keeps_unknown: ClassVar[bool] = True

    job: Id
    spec: JobSpec
    scheduling: Scheduling = Scheduling()
    standing: Standing = Standing.QUEUED
    wanted: Wanted = "run"
    epoch: int = 0
    reason: Message = ""
    source_digest: str = ""
    number: int = 0  # of the submission: earlier ones first
    trainers: int | None = None
    pservers: int | None = None
    preempted_by: str = ""
    outcome: Outcome | None = None
    create_time: str = ""
    start_time: str = ""
    end_time: str = ""

    @cached_property
    def most_trainers(self) -> int:
        """At most so many trainers are of use, or allowed."""
        lanes = self.spec.lanes if self.spec.mode == "sync" else 10_000
        most = self.scheduling.max_trainers if self.trainers is None else self.trainers
        return lanes if most is None else min(most, lanes)

    @cached_property
    def least_trainers(self) -> int:
        """It starts with no fewer trainers, and keeps them unless it is preempted."""
        return min(max(self.scheduling.min_trainers, self.spec.min_members), self.most_trainers)

    @cached_property
    def pservers_wanted(self) -> int:
        return self.spec.pservers if self.pservers is None else self.pservers

    @cached_property
    def needs(self) -> dict[Kind, int]:
        """What it starts with, and keeps."""
        return {"pserver": self.pservers_wanted, "trainer": self.least_trainers}

    @cached_property
    def turn(self) -> tuple[int, bool, int, str]:
        """Sorts jobs: those that come first."""
        return -self.scheduling.priority, self.standing is not Standing.ACTIVE, self.number, self.job

    @property
    def leaving(self) -> bool:
        """ACTIVE, and about to be PAUSED, CANCELLED or QUEUED: it gets no more members."""
        return self.standing is Standing.ACTIVE and (self.wanted != "run" or bool(self.preempted_by))


class TaskState(StrEnum):
    """Of a pre- or post-task.

    WAITING ─ an idle member gets it ─► RUNNING ─ exit code 0 ─► SUCCEEDED
       ▲                                  │ ├─ failed for the last time ─► FAILED
       └─ failed, or its member is lost ──┘ └─ cancelled ─► CANCELLED
    """

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def over(self) -> bool:
        return self in {TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELLED}


class TaskRun(Record):
    """Key `jobs/<job>/tasks/<name>`, written by the leader. `attempt` counts its starts: reports of an
    earlier one count for nothing. `failures`: attempts that ended badly; `lost`: attempts whose member was
    lost, which no retry is taken for. `member`, `host`, `incarnation`: who runs it, or ran it last. `output`:
    the end of what the last attempt that ended printed."""

    job: Id
    name: Id
    state: TaskState = TaskState.WAITING
    attempt: int = 0
    failures: int = 0
    lost: int = 0
    member: Id = ""
    host: Name = ""
    incarnation: Id = ""
    exit_code: int | None = None
    output: Message = ""
    reason: Message = ""
    start_time: str = ""
    end_time: str = ""


def spoken(name: str) -> str:
    """`pre-task 1` for `pre-0`: as users count."""
    stage, _, number = name.partition("-")
    return f"{stage}-task {int(number) + 1}"


class JobSchedule(Record):
    """Key `schedules/<name>`: jobs that begin again and again, called `<name>-<UTC time as yyyymmddhhmm>`.

    `cron`: minute, hour, day of month, month, day of week, in `time_zone`. `concurrency`: if the job before
    has not ended, this time is left out (forbid), or that job is cancelled (replace). `spec`: of the jobs,
    but for their name; their files go below `spec.storage`. `next_time`: the first time that is not decided
    yet. `last_time`, `last_job`, `reason`: the last decision."""

    keeps_unknown: ClassVar[bool] = True

    name: Id
    cron: str = Field(max_length=200)
    time_zone: str = Field(default="UTC", max_length=64)
    concurrency: Literal["forbid", "replace"] = "forbid"
    spec: JobSpec
    scheduling: Scheduling = Scheduling()
    source_digest: str = ""
    create_time: str = ""
    next_time: str = ""
    last_time: str = ""
    last_job: str = ""
    reason: Message = ""


Kind = Literal["trainer", "pserver"]
_WORDS: dict[Kind, str] = {"pserver": "parameter server", "trainer": "trainer"}


def in_words(kind: Kind, count: int) -> str:
    """`1 parameter server`, `2 trainers`."""
    return f"{count} {_WORDS[kind]}{'' if count == 1 else 's'}"


def both_in_words(trainers: int, pservers: int) -> str:
    """`3 trainers and 1 parameter server`; a collective job has trainers alone."""
    return in_words("trainer", trainers) + (f" and {in_words('pserver', pservers)}" if pservers else "")


class PoolMember(Record):
    """A place for one trainer or parameter server, registered by a host agent: key `pool/<kind>/<member>`,
    leased.

    `running`: the job whose process it runs now, with `epoch`; empty: idle. `trouble`: why that process does
    not run (it ended again and again). `ended`: the process of that epoch of the job ended with exit code 0
    and is not started again. `task`: it runs this attempt of a pre- or post-task of the job; once `ended`,
    how: `exit_code`, and the end of its output. `trireme_version`: of the host agent; empty: of an earlier
    one, which does not say."""

    member: Id
    kind: Kind
    host: Name
    agent: Id
    pid: int
    url: str = ""
    lease: int = 0
    incarnation: Id = ""
    cores: int = 1
    memory_bytes: int = 0
    device: str = "cpu"
    running: str = ""
    epoch: int = 0
    ended: bool = False
    trouble: Message = ""
    draining: bool = False
    task: Id = ""
    attempt: int = 0
    exit_code: int | None = None
    output: Message = ""
    trireme_version: Name = ""


class Drain(Record):
    """Key `pool/<kind>/<member>/drain`, written by the leader: the member gets no work until its users take
    this back. It outlives the member's registration, so a host that starts again stays drained."""

    ask_time: str = ""


class Assignment(Record):
    """Key `pool/<kind>/<member>/assignment`, written by the leader: the member runs a process of that job.
    `incarnation`: of the member that it is meant for. `task`: it runs that attempt of a pre- or post-task
    instead, for at most `limit_s` seconds."""

    job: Id
    epoch: int
    incarnation: Id = ""
    assign_time: str = ""
    task: Id = ""
    attempt: int = 0
    limit_s: float = 0.0

"""Why a job does not progress: one `Cause` for each situation, with a stable code. docs/explain.md has the
table of codes."""

from __future__ import annotations

from enum import StrEnum

from trireme_shared.protocol.records.record import Record


class Code(StrEnum):
    """Stable: programs may depend on them. A test compares them with the table in docs/explain.md."""

    # the job is over, or nobody runs it
    JOB_COMPLETED = "JOB_COMPLETED"
    JOB_FAILED = "JOB_FAILED"
    JOB_STOPPED = "JOB_STOPPED"
    # in a cluster: it waits, or was stopped
    WAITS_FOR_MEMBERS = "WAITS_FOR_MEMBERS"
    WAITS_FOR_JOBS = "WAITS_FOR_JOBS"
    WAITS_FOR_TIME = "WAITS_FOR_TIME"
    JOB_TASK_UNFINISHED = "JOB_TASK_UNFINISHED"
    JOB_TASK_FAILED = "JOB_TASK_FAILED"
    JOB_PAUSED = "JOB_PAUSED"
    JOB_CANCELLED = "JOB_CANCELLED"
    JOB_STOPPING = "JOB_STOPPING"
    JOB_UNREADABLE = "JOB_UNREADABLE"
    PROCESSES_FAIL = "PROCESSES_FAIL"
    # nobody decides
    ETCD_UNREACHABLE = "ETCD_UNREACHABLE"
    ETCD_OUT_OF_SPACE = "ETCD_OUT_OF_SPACE"
    ETCD_SILENT = "ETCD_SILENT"
    NO_MASTER = "NO_MASTER"
    MASTER_SILENT = "MASTER_SILENT"
    MASTER_TAKING_OVER = "MASTER_TAKING_OVER"
    COUNTING_DATASET = "COUNTING_DATASET"
    # parameters or members are not there
    STORAGE_UNREACHABLE = "STORAGE_UNREACHABLE"
    TRAINER_REFUSED = "TRAINER_REFUSED"
    USER_CODE_FAILS = "USER_CODE_FAILS"
    NO_PARAMETER_SERVER = "NO_PARAMETER_SERVER"
    FEWER_PARAMETER_SERVERS = "FEWER_PARAMETER_SERVERS"
    ROLLING_BACK = "ROLLING_BACK"
    NO_TRAINER = "NO_TRAINER"
    INITIALISING_PARAMETERS = "INITIALISING_PARAMETERS"
    FEWER_THAN_MIN_MEMBERS = "FEWER_THAN_MIN_MEMBERS"
    CHECKPOINT_PAUSE = "CHECKPOINT_PAUSE"
    # it runs, and somebody is waited for
    MEMBER_SILENT = "MEMBER_SILENT"
    LANES_NOT_STARTED = "LANES_NOT_STARTED"
    LATE_TASKS = "LATE_TASKS"
    EVALUATION_AWAITED = "EVALUATION_AWAITED"
    SLOWER_TRAINER_AWAITED = "SLOWER_TRAINER_AWAITED"
    SLOW_MINIBATCH = "SLOW_MINIBATCH"
    NO_PROGRESS = "NO_PROGRESS"
    PROGRESS_IS_FINE = "PROGRESS_IS_FINE"
    # it runs, and somebody should know
    PARAMETER_SERVER_AWAY = "PARAMETER_SERVER_AWAY"
    CHECKPOINTS_FAIL = "CHECKPOINTS_FAIL"
    OPERATION_WAITS = "OPERATION_WAITS"
    TASK_DISCARDED = "TASK_DISCARDED"
    TRAINERS_WITHOUT_LANES = "TRAINERS_WITHOUT_LANES"
    FEWER_TRAINERS = "FEWER_TRAINERS"
    TRAINERS_FETCH_PARAMETERS = "TRAINERS_FETCH_PARAMETERS"


class Cause(Record):
    """`summary`: one sentence. `details`: sentences with the values. `hints`: commands or actions, the most
    useful one first."""

    code: Code
    summary: str
    details: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()


class Explanation(Cause):
    """The most important cause, and in `also` the others, in order of importance. `job`: its name."""

    job: str
    also: tuple[Cause, ...] = ()

    @property
    def codes(self) -> list[Code]:
        return [self.code, *(cause.code for cause in self.also)]


def explanation_of(job: str, first: Cause, *others: Cause) -> Explanation:
    return Explanation(
        job=job, code=first.code, summary=first.summary, details=first.details, hints=first.hints, also=others
    )

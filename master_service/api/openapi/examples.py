"""Examples in the API's document: of what requests send and answers return, by the name of their schema. Each is a validated record."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from master_service.api import resources as of_job
from master_service.api import resources_cluster as of_cluster
from master_service.core.explanation.cause import Cause, Code, Explanation
from trireme_shared import __version__
from trireme_shared.protocol.evaluations import Evaluation
from trireme_shared.protocol.events import EventRecord
from trireme_shared.protocol.records import (
    AcquireTask,
    Completed,
    CompleteTask,
    FailTask,
    JobResult,
    JobSpec,
    MetricBatch,
    MetricsTaken,
    Mode,
    Stage,
    StepMetrics,
    StepTimes,
    TakeNext,
    Task,
    TaskAnswer,
    TaskKind,
    TaskProgress,
    TaskSummary,
    UserFailure,
)
from trireme_shared.protocol.records.cluster import Scheduling, Source, Standing, TaskState
from trireme_shared.protocol.records.datasets import Parquet
from trireme_shared.protocol.records.job import Losses
from trireme_shared.protocol.records.job_spec import JobSettings
from trireme_shared.protocol.records.operations import (
    MovedBytes,
    Operation,
    OperationKind,
    OperationState,
    Resize,
    ResizePhase,
    ResizePrediction,
)

_BEGIN, _END = "2026-11-23T12:00:00.000Z", "2026-11-23T12:00:04.000Z"
_CHECKPOINT = "0c0ffee0c0ffee0c0ffee0c0ffee0c0f"
_DIGEST = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"
_VERSION = "52b3a1c9d0e4f687"
_SCRIPT = "import trireme\n\nconfig = trireme.Config(epochs=5)\n"


def examples() -> dict[str, BaseModel]:
    """Schema -> its example."""
    return {type(record).__name__: record for record in (*_about_a_job(), *_of_trainers(), *_about_a_cluster())}


def _settings() -> JobSettings:
    return JobSettings(
        dataset=Parquet(urls=("s3://bucket/digits/train-*.parquet",)), epochs=5, global_batch_size=256, lanes=8
    )


def _progress() -> of_job.JobProgress:
    return of_job.JobProgress(
        epoch=1, epochs=5, step=61, loss=0.31, records_done=15616, records_total=59950, records_per_s=5120.0, eta_s=8.7
    )


def _about_a_job() -> Iterator[BaseModel]:
    yield of_job.Empty()
    yield of_job.JobView(
        job="digits",
        phase="RUNNING",
        stage=Stage.TRAIN,
        mode=Mode.SYNC,
        generation=3,
        reason="",
        standing="ACTIVE",
        progress=_progress(),
        members=of_job.MemberCounts(trainers=2, trainers_desired=2, pservers=1, pservers_desired=1),
        losses=Losses(),
        result=JobResult(),
        master=of_job.MasterView(master_id="master-0", url="http://127.0.0.1:8470", term=17),
        spec=JobSpec(job="digits", script="digits.py", storage="s3://bucket/runs/digits", **dict(_settings())),
        version=_VERSION,
    )
    yield Explanation(
        job="digits",
        code=Code.NO_TRAINER,
        summary="No trainer is registered.",
        hints=("start a trainer",),
        also=(
            Cause(code=Code.CHECKPOINTS_FAIL, summary="The last checkpoint was not written.", details=("disk full",)),
        ),
    )
    task = of_job.TaskView(
        task_id="17",
        kind=TaskKind.TRAIN,
        state="PENDING",
        epoch=1,
        stream=2,
        index=4,
        file="train-0.parquet",
        first=8704,
        count=512,
        attempt=1,
        trainer="trainer-0",
        minibatches=3,
        silent_s=0.2,
        remaining_s=29.8,
    )
    yield task
    yield of_job.TaskPage(tasks=(task,), next_page_token="100")  # noqa: S106
    yield TaskSummary(
        epoch=1, epochs=5, stage=Stage.TRAIN, total=24, todo=14, pending=2, done=8, discarded=0,
        records_total=11990, records_done=4096, task_records=512, steps_per_epoch=47, total_steps=235,
    )  # fmt: skip
    member = of_job.MemberView(
        member_id="trainer-0",
        kind="trainer",
        url="http://127.0.0.1:40123",
        incarnation="trainer-0-1a2b3c",
        host="node-7",
        pid=4711,
        lanes=(0, 4),
        tasks=("17",),
    )
    yield member
    yield of_job.MemberPage(members=(member,))
    yield of_job.SuspectAnswer(dead=True)
    yield of_job.CreateCheckpoint(cause="before an experiment")
    checkpoint = of_job.CheckpointView(checkpoint_id=_CHECKPOINT, step=60, timeline=0, state="LATEST", kind="base")
    yield checkpoint
    yield of_job.CheckpointPage(checkpoints=(checkpoint,))
    yield of_job.CheckpointDetails(
        **dict(checkpoint),
        epoch=1,
        pservers=1,
        size_bytes=4_194_304,
        needed_bytes=4_194_304,
        write_time=_END,
        files=("part-0.safetensors",),
    )
    resize = Resize(
        trainers=4, pservers=1, before_trainers=2, before_pservers=1, trainers_asked=True, phase=ResizePhase.STARTING
    )
    operation = Operation(
        operation_id="op-9f86d081",
        kind=OperationKind.CREATE_CHECKPOINT,
        cause="before an experiment",
        state=OperationState.DONE,
        checkpoint_id=_CHECKPOINT,
        step=60,
        limit_s=600,
        create_time=_BEGIN,
        end_time=_END,
    )
    yield operation
    yield of_job.OperationPage(operations=(operation,))
    yield of_job.CreateResize(trainers=4, cause="more hosts")
    view = of_job.ResizeView(
        **dict(resize),
        resize_id="op-60303ae2",
        state=OperationState.RUNNING,
        reason="waits for trainers",
        create_time=_BEGIN,
    )
    yield view
    yield of_job.ResizePage(resizes=(view,))
    yield ResizePrediction(
        trainers=2, pservers=2, before_trainers=2, before_pservers=1, slots=512, groups=8, bytes=2_097_152,
        by_pserver=(MovedBytes(pserver=0, sent=2_097_152), MovedBytes(pserver=1, received=2_097_152)),
    )  # fmt: skip
    event = EventRecord(
        event_id=104,
        event_time=_BEGIN,
        name="member_joined",
        message="trainer-0 has joined",
        fields={"member": "trainer-0"},
    )
    yield of_job.EventPage(events=(event,), next_after=104, oldest=1, newest=104)
    yield of_job.LogPage(logs=(of_job.LogView(log="trainer-0", bytes=18_204, write_time=_BEGIN),))
    line = of_job.LogLine(time=_BEGIN, text="epoch 1: loss 0.31")
    yield of_job.LogLines(log="trainer-0", lines=(line,), next_after=18_204, next_before=18_185)
    points = (
        of_job.MetricPoint(number=60, loss=0.33, records=256),
        of_job.MetricPoint(number=61, loss=0.31, records=256),
    )
    yield of_job.MetricPage(metric="step_loss", points=points)
    summary = of_job.SeriesSummary(name="loss", first_step=0, last_step=61, points=62, width=1)
    yield of_job.SeriesPage(series=(summary,))
    point = of_job.SeriesPoint(step=60, last_step=61, mean=0.32, least=0.31, most=0.33, weight=512)
    yield of_job.SeriesPoints(name="loss", points=(point,))
    evaluated = Evaluation(number=3, step=60, timeline=0, checkpoint=_CHECKPOINT, metrics={"accuracy": 0.91})
    yield of_job.EvaluationPage(evaluations=(evaluated,))
    yield of_job.Version(name="trireme-master", version=__version__, api="v1")
    yield of_job.TokenAccess(role="viewer")
    yield of_job.Health(status="ok")


def _of_trainers() -> Iterator[BaseModel]:
    task = Task(
        task_id="17", kind=TaskKind.TRAIN, attempt=1, epoch=1, stream=2, index=4, stream_length=24, file="train-0.parquet",
        first=8704, count=512,
    )  # fmt: skip
    failure = UserFailure(
        error_type="ValueError", message="labels must be below 10", task="task 17", trainer="trainer-0"
    )
    yield AcquireTask(
        trainer="trainer-0", request="acquire-1a2b3c", generation=3, stream=2, epoch=1, index=4, wait_s=10
    )
    yield TaskAnswer(answer="task", task=task, stream_length=24)
    yield TaskProgress(trainer="trainer-0", attempt=1, minibatches=3, epoch=1, timeline=0)
    yield CompleteTask(
        trainer="trainer-0",
        attempt=1,
        records=512,
        epoch=1,
        timeline=0,
        next=TakeNext(request="next-1a2b3c", generation=3),
    )
    yield Completed(next=task)
    yield FailTask(trainer="trainer-0", attempt=1, failure=failure, epoch=1, timeline=0)
    yield failure
    step = StepMetrics(step=61, epoch=1, loss_sum=39.7, records=128, lr=(0.1,))
    times = StepTimes(step=61, seconds=0.5, compute=0.4, push=0.02, pull=0.06)
    yield MetricBatch(trainer="trainer-0", steps=(step,), lane_s=0.05, times=times, whole=True)
    yield MetricsTaken(next=62, stored=40)


def _about_a_cluster() -> Iterator[BaseModel]:
    source, scheduling = Source(file_name="digits.py", text=_SCRIPT), Scheduling(min_trainers=2, priority=70)
    yield of_cluster.CreateJob(name="digits", settings=_settings(), source=source, scheduling=scheduling)
    job = of_cluster.ClusterJobView(
        job="digits",
        state="RUNNING",
        standing=Standing.ACTIVE,
        reason="",
        wanted="run",
        mode=Mode.SYNC,
        scheduling=scheduling,
        pservers=1,
        members=of_cluster.MembersHeld(trainers=2, trainers_running=2, pservers=1, pservers_running=1),
        starts=1,
        progress=_progress(),
        source_digest=_DIGEST,
        create_time=_BEGIN,
        start_time=_END,
        version=_VERSION,
    )
    yield job
    yield of_cluster.ClusterJobPage(jobs=(job,))
    ran = of_cluster.JobTaskView(
        name="pre-0",
        command="python prepare.py",
        function="",
        when="completed",
        timeout_s=600,
        retries=0,
        state=TaskState.SUCCEEDED,
        attempt=1,
        failures=0,
        lost=0,
        member_id="node-7-trainer-0",
        host="node-7",
        exit_code=0,
        reason="",
        output="1797 records\n",
        start_time=_BEGIN,
        end_time=_END,
    )
    yield of_cluster.JobTaskPage(job_tasks=(ran,))
    yield of_cluster.JobSource(digest=_DIGEST, file_name="digits.py", text=_SCRIPT)
    yield of_cluster.CreateSchedule(
        name="nightly", settings=_settings(), source=source, cron="30 2 * * *", time_zone="Europe/Berlin"
    )
    schedule = of_cluster.ScheduleView(
        name="nightly",
        cron="30 2 * * *",
        time_zone="Europe/Berlin",
        concurrency="forbid",
        next_time="2026-11-24T01:30:00Z",
        last_time="2026-11-23T01:30:00Z",
        last_job="nightly-202611230130",
        reason="created nightly-202611230130",
        scheduling=scheduling,
        source_digest=_DIGEST,
        create_time=_BEGIN,
        version=_VERSION,
    )
    yield schedule
    yield of_cluster.SchedulePage(schedules=(schedule,))
    place = of_cluster.PoolMemberView(
        member_id="node-7-trainer-0",
        kind="trainer",
        host="node-7",
        agent="node-7",
        state="running",
        job="digits",
        cores=4,
        memory_bytes=8 << 30,
        device="cpu",
        version=_VERSION,
    )
    yield place
    yield of_cluster.PoolMemberPage(members=(place,))
    kind = of_cluster.PoolKind(members=4, idle=2, draining=0, needed=2)
    yield of_cluster.PoolView(trainers=kind, pservers=kind)

"""What the API's document says in words (properties, parameters, tags), and examples of what requests send
and answers return.

In PROPERTIES `name` is the meaning in every schema, `Schema.name` in that one. What only one record has is
told at the record (`Field(description=...)`). tests/tidy/test_openapi.py fails for a property without a
description, and for a line that no property uses. Each example is a validated record, by the name of its
schema.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from trireme_shared import __version__
from trireme_shared.protocol import rest as of_job
from trireme_shared.protocol import rest_cluster as of_cluster
from trireme_shared.protocol.evaluations import Evaluation
from trireme_shared.protocol.events import EventRecord
from trireme_shared.protocol.explanations import Cause, Code, Explanation
from trireme_shared.protocol.records import (
    AcquireTask,
    Completed,
    CompleteTask,
    FailTask,
    JobResult,
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
from trireme_shared.protocol.records.cluster import Scheduling, Source, TaskState
from trireme_shared.protocol.records.datasets import Parquet
from trireme_shared.protocol.records.job import Losses
from trireme_shared.protocol.records.job_choices import AcceptedChange
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

PROPERTIES = {
    "also": "The other causes, in order of importance.",
    "code": "Stable name of the cause, for programs.",
    "details": "Sentences with the values.",
    "hints": "Commands or actions, the most useful one first.",
    "summary": "The cause as one sentence.",
    "attempt": "Number of the attempt; reports of an earlier one count for nothing.",
    "before_pservers": "Number of parameter servers before the resize.",
    "before_trainers": "Number of trainers before the resize.",
    "block_bytes": "Bytes of one block of parameters, the unit of push and pull; a multiple of 64.",
    "bytes": "Bytes of the parameters and optimizer states that move.",
    "cause": "For people: who requests it, and why.",
    "checkpoint_checksum": "Algorithm of the checksums in checkpoints.",
    "checkpoint_every_epochs": "A checkpoint after so many epochs; null: never by epochs.",
    "checkpoint_every_seconds": "A checkpoint after so many seconds; null: never by time.",
    "checkpoint_every_steps": "A checkpoint after so many steps; null: never by steps.",
    "checkpoint_id": "Id of the checkpoint; empty: there is none yet.",
    "checkpoint_kind": "Asynchronous jobs: all parameter servers save at one moment, or each by itself.",
    "clip_grad_norm": "The gradient of a whole step (asynchronous jobs: of each push) is scaled down to this "
            "norm; null: never.",
    "grad_norm_every": "Synchronous jobs: the norm of the gradient is measured in every so many steps; 0: "
            "never.",
    "clip_lane_norm": "The gradient of each lane's minibatch is scaled down to this norm; null: never.",
    "column_types": "Types of columns by name, where the beginning of the first file misleads.",
    "columns": "Names of the columns; null: all of them, or the files' stems.",
    "snapshot_bytes": "Synchronous: bytes of rows of embedding tables that steps keep at each parameter "
            "server while a checkpoint is written; beyond them a step waits for it.",
    "init_from": "Path or URL, which members can read, of a file with the values that parameters and buffers "
            "start with (safetensors, or a state_dict); rows of embedding tables lie beside it, in "
            "tables/; null: those that the script gives.",
    "init_partial": "Values in that file which do not fit the model are left out.",
    "init_optimizer": "The optimizer and the scheduler start with their state in that file, which torch.save "
            "has written.",
    "command": "A command for /bin/sh; empty if a function is given.",
    "concurrency": "If the job before has not ended: this time is left out (forbid), or that job is "
            "cancelled (replace).",
    "count": "Number of records.",
    "create_time": "When it was created, RFC 3339.",
    "cron": "Minute, hour, day of month, month, day of week.",
    "dataset": "What the job trains on.",
    "decode": "How the content of a record is read.",
    "deterministic": "Synchronous trainers on GPUs use kernels that give the same bits each time.",
    "device": "Where trainers compute.",
    "dispatch": "Who keeps the task queue: a master, or the trainers themselves (etcd).",
    "end_time": "When it ended, RFC 3339; empty: it has not.",
    "epoch": "Number of the pass over the dataset, from 0.",
    "epochs": "Number of passes over the dataset.",
    "error_code": "Code of the error that ended it; empty: none did.",
    "error_feedback": "Asynchronous: rounding errors of sent gradients are added to the next push; null: on "
            "whenever gradients are cast.",
    "evaluation_dataset": "What the trained model is evaluated on; null: it is not.",
    "checkpoint": "Id of the checkpoint of its version; empty: there was none.",
    "best": "The best evaluation, whose parameters are exported, too; null: there is none, or the job has "
            "no keep_best.",
    "keep_best": "Which evaluation is the best one, as metric:min or metric:max: its checkpoint is kept and "
            "exported; null: none is.",
    "stop_early": "Training ends when evaluations get no better; null: it does not.",
    "StopEarly.metric": "The metric and which of its values are better, as metric:min or metric:max.",
    "min_delta": "A value counts as better if it is so by more than this.",
    "StopEarly.patience": "So many evaluations in a row that are not better end training.",
    "evaluate_every": "So many steps (asynchronous: minibatches of all trainers), or epoch: such versions "
            "are evaluated while the job trains; null: none is.",
    "exports": "Files of the exported model, by kind.",
    "failures": "How often an attempt ended badly.",
    "file": "Name of the file that the records are in; empty: none.",
    "file_name": "Name of the script's file.",
    "first": "Number of the first record in the file.",
    "function": "A function as `package.module:function`, called without arguments; empty if a command is "
            "given.",
    "generation": "Number of the membership that the caller knows; it grows at every join and death.",
    "global_batch_size": "Number of records of one step, over all lanes.",
    "gradient_dtype": "Dtype in which float32 gradients are sent.",
    "groups": "Number of groups of slots that move together.",
    "host": "Name of the host.",
    "image_size": "Height and width that images are resized to; null: as they are.",
    "index": "Position of the task in its stream, from 0.",
    "job": "Name of the job.",
    "join_window_s": "Members that join within so many seconds after a change make one generation.",
    "keep_checkpoints": "Number of checkpoints that are kept.",
    "kind": "What it is.",
    "lanes": "Number of virtual workers of synchronous training; a power of two.",
    "last_step": "The last step that it is about.",
    "lease_ttl_s": "Seconds after which a silent member counts as dead.",
    "least": "The smallest reported value.",
    "limit_s": "It fails if it has not ended after so many seconds.",
    "log": "Name of the log: that of the member; in a cluster with the number of the epoch after it.",
    "loss": "Mean loss over the records; null: not known, or not finite.",
    "losses": "Minibatches that blocks never got, by parameter server.",
    "max_discarded_fraction": "The job fails if more than this share of the records is discarded.",
    "max_task_failures": "A task is discarded after so many failed attempts.",
    "max_user_failures": "The job fails after so many exceptions of the user's code outside of tasks.",
    "member_id": "Id of the member; empty: none.",
    "metrics": "Result of the evaluation, by name.",
    "minibatches": "Number of minibatches that the attempt has finished.",
    "mode": "sync (deterministic steps) or async.",
    "modules": "Modules beside the script that it imports: path to text.",
    "most": "The largest reported value.",
    "name": "Its name.",
    "next_page_token": "The page_token of the next page; empty: this is the last one.",
    "number": "Number of the step or epoch.",
    "offset": "Byte at which the first record starts; null: the format has no lines.",
    "on_nonfinite": "A loss or gradient that is not finite: the job fails, the minibatch is left out, or it "
            "is trained all the same.",
    "parameter_dtype": "Dtype in which float32 parameters are sent.",
    "points": "The points of this page, by number.",
    "post_tasks": "In a cluster: commands that run after the job's end.",
    "pre_tasks": "In a cluster: commands that run before the job's members are assigned.",
    "pservers": "Number of parameter servers.",
    "pull_every": "Asynchronous: minibatches for each pull.",
    "push_every": "Asynchronous: minibatches for each push.",
    "reader": "A reader as `package.module:name`, which members can import.",
    "reason": "Why it is as it is, as a sentence; empty: nothing to say.",
    "rebalance_s": "Seconds between two looks at the trainers' speed.",
    "records": "Number of records.",
    "records_done": "Number of records that are done.",
    "records_per_task": "Number of records in one task; null: up to 16 minibatches, fewer where lanes would "
            "not end an epoch together.",
    "records_total": "Number of records in all.",
    "recovery_timeout_s": "The job fails if members that it needs do not come back within so many seconds.",
    "request": "Id of the request, chosen by the caller: the same one gets the same pending task again.",
    "retries": "How often it may fail before that counts.",
    "scheduling": "What the job may have of the pool.",
    "JobView.script": "Path or URL of the script, or `source:<digest>/<file name>`.",
    "seed": "Seed of the order of records and of all random numbers.",
    "shuffle": "Records are read in another order in each epoch.",
    "skip_after_seconds": "Asynchronous: a parameter server that is away so long is skipped; null: it is "
            "waited for.",
    "skipped": "Number of records left out, because their loss or gradient was not finite.",
    "slot_count": "Number of shares that blocks are dealt into; a resize moves shares.",
    "slots": "Number of slots that move.",
    "source_digest": "SHA-256 of the script and its modules, in hex; empty: the script is a path or URL.",
    "sources": "SHA-256 of each file of the script when the job was created: members run no others.",
    "stage": "What the job does: TRAIN, EVALUATE, EXPORT, DONE.",
    "standing": "Where the job is in its cluster; empty: it is in none.",
    "start_time": "When it last started, RFC 3339; empty: it has not.",
    "state": "State; there may be new ones.",
    "step": "Number of the step; null: not known yet.",
    "storage": "Path or URL where the job's files go; empty: below the cluster's storage.",
    "straggler_factor": "Work that takes so many times the usual is done by another trainer, too.",
    "stragglers": "on: lanes follow the measured speed of trainers, and late work is done twice.",
    "strategy": "live: slots move while the job trains. restart: all parameter servers load a checkpoint.",
    "stream": "The lane of synchronous training that the task belongs to, from 0.",
    "stream_length": "Number of tasks of the stream in this epoch.",
    "task_id": "Id of the task: `17`, `evaluate-3`, `export-0`.",
    "task_timeout_ceiling_s": "A silent attempt is given to another trainer after at most so many seconds "
            "for each lane of the trainer with the most.",
    "task_timeout_floor_s": "A silent attempt is given to another trainer after at least so many seconds.",
    "text": "Text of the script.",
    "threads_per_trainer": "Number of threads of each trainer.",
    "time_zone": "Name of the time zone, as `Europe/Berlin`.",
    "timeline": "Number of the history that it belongs to: the generation of the last rollback.",
    "timeout_s": "Seconds that one attempt may take.",
    "total": "Number of tasks.",
    "trainer": "Id of the trainer; empty: none.",
    "trainers": "Number of trainers.",
    "url": "Where it listens.",
    "urls": "Paths, globs or fsspec URLs of the files.",
    "version": "What users and the leader have decided, as a digest; with quotes around it, it is what "
            "If-Match takes.",
    "weight": "Share of members among jobs with the same priority.",
    "when": "A post-task runs once the job is COMPLETED, or (always) also once it is FAILED or CANCELLED.",
}  # fmt: skip

PARAMETERS = {
    "after": ("Events with a larger event_id.", 0),
    "before": ("Lines that end at this place of the log: `next_before` of the answer before.", None),
    "checkpoint_id": ("Id of a checkpoint, as in listCheckpoints.", "0c0ffee0c0ffee0c0ffee0c0ffee0c0f"),
    "Idempotency-Key": ("The same key is the same request: it takes effect once, however often it is sent.",
            "retrain-2026-11-23"),
    "If-Match": (('Only if it still has one of these versions, else PRECONDITION_FAILED (412): ETag of a '
            'GET, or `"<version>"`; `*`: any.'), '"52b3a1c9d0e4f687"'),
    "job": ("Name of the job.", "digits"),
    "kind": ("Tasks of this kind.", "TRAIN"),
    "log": ("Name of a log, as in listLogs; or the id of a member: the log of its last epoch.", "trainer-0"),
    "member": ("Id of a member of the pool, as in listPoolMembers.", "node-7-trainer-0"),
    "member_id": ("Id of a member of the job, as in listMembers.", "trainer-0"),
    "metric": ("Name of the series: step_loss or epoch_loss.", "step_loss"),
    "operation_id": ("Id of an operation, as in the answer of what began it.", "checkpoint-1a2b3c"),
    "page_size": ("At most so many items.", 100),
    "page_token": ("next_page_token of the page before; empty: the first page.", "Wzk5XQ"),
    "resize_id": ("Id of a resize, as in listResizes.", "resize-1a2b3c"),
    "schedule": ("Name of the schedule.", "nightly"),
    "strategy": ("live: slots move while the job trains. restart: by a checkpoint.", "live"),
    "state": ("Only those in this state; without it all.", None),
    "tail": ("Without `after`: at most so many lines.", 100),
    "task_id": ("Id of the task: `17`, `evaluate-3`, `export-0`.", "17"),
    "wait_s": ("Wait at most so many seconds for the end of what is asked for.", 10.0),
}  # fmt: skip

TAGS = {
    "jobs": "One job and how it stands; in a cluster also: submit, list, pause, resume, cancel, delete.",
    "pool": "The members that a cluster assigns to its jobs.",
    "schedules": "Jobs that begin again and again, at the times of a cron expression.",
    "tasks": "Ranges of records, and how far each is.",
    "task leases": "For trainers: take a task, report about it.",
    "members": "Trainers and parameter servers of one job.",
    "checkpoints": "Saved versions of a job.",
    "resizes": "Other numbers of trainers and parameter servers while a job trains.",
    "operations": "The progress of what takes long.",
    "events": "What happened to a job.",
    "logs": "What members wrote, dead ones included: their logs, and what scripts printed.",
    "metrics": "Losses by step and by epoch.",
    "system": "Version, health, metrics of the process.",
}  # fmt: skip


_BEGIN, _END = "2026-11-23T12:00:00.000Z", "2026-11-23T12:00:04.000Z"
_CHECKPOINT = "0c0ffee0c0ffee0c0ffee0c0ffee0c0f"
_DIGEST = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"
_VERSION = "52b3a1c9d0e4f687"
_SCRIPT = "import trireme\n\nconfig = trireme.Config(epochs=5)\n"


def examples() -> dict[str, BaseModel]:
    """Schema -> its example."""
    return {
        type(record).__name__: record for record in (*_about_a_job(), *_of_trainers(), *_about_a_cluster())
    }


def _settings() -> JobSettings:
    return JobSettings(
        dataset=Parquet(urls=("s3://bucket/digits/train-*.parquet",)),
        epochs=5,
        global_batch_size=256,
        lanes=8,
    )


def _progress() -> of_job.JobProgress:
    return of_job.JobProgress(
        epoch=1,
        epochs=5,
        step=61,
        loss=0.31,
        records_done=15616,
        records_total=59950,
        records_per_s=5120.0,
        eta_s=8.7,
    )


def _about_a_job() -> Iterator[BaseModel]:
    yield of_job.Empty()
    job = of_job.JobView(
        job="digits",
        state="RUNNING",
        phase="RUNNING",
        standing="ACTIVE",
        reason="",
        mode=Mode.SYNC,
        stage=Stage.TRAIN,
        generation=3,
        progress=_progress(),
        members=of_job.MemberCounts(trainers=2, trainers_desired=2, pservers=1, pservers_desired=1),
        losses=Losses(),
        result=JobResult(),
        master=of_job.MasterView(master_id="master-0", url="http://127.0.0.1:8470", term=17),
        scheduling=Scheduling(min_trainers=2, priority=70),
        starts=1,
        settings=_settings(),
        history=(AcceptedChange(number=1, options=1, time=_BEGIN, text="optimizer lr 0.1 -> 0.05"),),
        script=f"source:{_DIGEST}/digits.py",
        storage="s3://bucket/runs/digits",
        source_digest=_DIGEST,
        create_time=_BEGIN,
        start_time=_END,
        version=_VERSION,
    )
    yield job
    listed = job.with_fields(
        stage=None, generation=None, losses=None, result=None, settings=None, history=None
    )
    yield of_job.JobPage(jobs=(listed,))
    yield Explanation(
        job="digits",
        code=Code.NO_TRAINER,
        summary="No trainer is registered.",
        hints=("start a trainer",),
        also=(
            Cause(
                code=Code.CHECKPOINTS_FAIL,
                summary="The last checkpoint was not written.",
                details=("disk full",),
            ),
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
    yield of_job.TaskPage(tasks=(task,), next_page_token="Wzk5XQ")  # noqa: S106
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
    checkpoint = of_job.CheckpointView(
        checkpoint_id=_CHECKPOINT, step=60, timeline=0, state="LATEST", kind="base"
    )
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
        trainers=4,
        pservers=1,
        before_trainers=2,
        before_pservers=1,
        trainers_asked=True,
        phase=ResizePhase.STARTING,
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
    yield of_job.Version(
        name="trireme-master",
        version=__version__,
        api="v1",
        state_schema=1,
        members={__version__: 4},
        places={__version__: 4},
    )
    yield of_job.TokenAccess(role="viewer")
    yield of_job.LoginCode(code="trireme_login_9f2c", valid_s=120.0)
    yield of_job.Login(token="trireme_viewer_52b3")  # noqa: S106  an example
    yield of_job.Health(status="ok")


def _of_trainers() -> Iterator[BaseModel]:
    task = Task(
        task_id="17", kind=TaskKind.TRAIN, attempt=1, epoch=1, stream=2, index=4, stream_length=24,
        file="train-0.parquet", first=8704, count=512,
    )  # fmt: skip
    failure = UserFailure(
        error_type="ValueError", message="labels must be below 10", task="task 17", trainer="trainer-0"
    )
    yield AcquireTask(
        trainer="trainer-0", request="acquire-1a2b3c", generation=3, stream=2, epoch=1, index=4, wait_s=10
    )
    following = task.with_fields(task_id="91", attempt=0, index=5, file="train-3.parquet", first=512)
    yield TaskAnswer(answer="task", task=task, following=following, stream_length=24)
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

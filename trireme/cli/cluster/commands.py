"""The commands about clusters and their jobs: their options. This module loads neither torch nor pydantic."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trireme.cli.options import (
    CLUSTER,
    OF_EXCHANGE,
    START,
    WATCH,
    Advertise,
    Assignments,
    Backend,
    BucketBytes,
    Check,
    DataDir,
    Device,
    Epochs,
    Etcd,
    EtcdCa,
    EtcdCert,
    EtcdKey,
    EtcdPasswordFile,
    EtcdUser,
    ExchangeOfJob,
    GlobalBatchSize,
    GradientDtype,
    InitFrom,
    InitOptimizer,
    InitPartial,
    Insecure,
    JobName,
    Json,
    Lanes,
    MaxStaleness,
    MinMembers,
    Mode,
    ParameterDtype,
    Pservers,
    PullEvery,
    PushEvery,
    Reduction,
    RestartDelayS,
    Restarts,
    Script,
    Seed,
    StalenessRate,
    Strategy,
    Trackers,
    Url,
    WaitS,
    of_job,
    say_checking,
)
from trireme.cli.suggestions import WithSuggestions

_ETCD = ("etcd", "etcd_user", "etcd_password_file", "etcd_ca", "etcd_cert", "etcd_key")
_PLACES = ("data_dir", "port", "standbys", "storage", "host", "advertise", *_ETCD)  # of `up`, as of `run`
_SETTINGS = (  # of `submit`
    "mode",
    "strategy",
    "pservers",
    "min_members",
    *OF_EXCHANGE,
    "restart_policy",
    "restart_delay_s",
    "lanes",
    "epochs",
    "init_from",
    "init_partial",
    "trackers",
    "init_optimizer",
    "global_batch_size",
    "seed",
    "push_every",
    "pull_every",
    "lr_staleness_modulation",
    "max_staleness",
    "device",
    "gradient_dtype",
    "parameter_dtype",
    "pre_tasks",
    "post_tasks",
)
_SCHEDULING = (
    "min_trainers",
    "max_trainers",
    "priority",
    "weight",
    "preemptible",
    "after",
    "not_before_time",
)
_SCHEDULE = ("cron", "time_zone", "concurrency")
_Member = Annotated[str, typer.Argument(metavar="MEMBER", help="Its member_id in `trireme pool`.")]

schedules = typer.Typer(name="schedules", no_args_is_help=False)
pool = typer.Typer(name="pool", no_args_is_help=False)


def add_to(app: typer.Typer) -> None:
    app.command(cls=WithSuggestions, rich_help_panel=START)(submit)
    app.command(rich_help_panel=WATCH)(jobs)
    for command in (up, down, job_tasks, pause, resume, cancel, delete):
        app.command(rich_help_panel=CLUSTER)(command)
    app.add_typer(schedules, rich_help_panel=CLUSTER)
    app.add_typer(pool, rich_help_panel=CLUSTER)


def up(
    trainers: Annotated[
        int | None,
        typer.Option(
            help="Places for trainers. Default: one for each GPU, else for each core but one.",
            min=0,
            max=1024,
            metavar="N",
        ),
    ] = None,
    pservers: Annotated[
        int | None,
        typer.Option(help="Places for parameter servers. Default: 1.", min=0, max=128, metavar="N"),
    ] = None,
    standbys: Annotated[int | None, typer.Option(help="Number of standby masters.", metavar="N")] = None,
    data_dir: DataDir = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the leader's REST API. Default: any free port.", metavar="P")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            help="Files of all jobs go below this path or URL. Default: in the data folder.", metavar="URL"
        ),
    ] = None,
    job_retention_s: Annotated[
        float | None,
        typer.Option(
            "--job-retention-s",
            help="Delete jobs so many seconds after their end, as `trireme delete` does. Default: never.",
            min=1,
            metavar="S",
        ),
    ] = None,
    etcd: Etcd = None,
    etcd_user: EtcdUser = None,
    etcd_password_file: EtcdPasswordFile = None,
    etcd_ca: EtcdCa = None,
    etcd_cert: EtcdCert = None,
    etcd_key: EtcdKey = None,
    host: Annotated[
        str | None, typer.Option(help="Address at which all listen. Default: 127.0.0.1.", metavar="ADDRESS")
    ] = None,
    advertise: Advertise = None,
    launcher: Annotated[
        str,
        typer.Option(
            help="What starts the places: processes on this machine, actors of a Ray cluster, or none: "
            "by hand.",
            metavar="local|ray|none",
        ),
    ] = "local",
    max_trainers: Annotated[
        int | None,
        typer.Option(
            help="So many places for trainers while jobs need them. Default: --trainers.",
            min=0,
            max=10_000,
            metavar="N",
        ),
    ] = None,
    max_pservers: Annotated[
        int | None,
        typer.Option(
            help="So many places for parameter servers while jobs need them. Default: --pservers.",
            min=0,
            max=1024,
            metavar="N",
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Ray: the cluster that this machine is a node of. Default: auto.", metavar="ADDRESS"
        ),
    ] = None,
    trainer_resources: Annotated[
        str | None,
        typer.Option(
            help="Ray: what a trainer takes. Default: CPU=1.", metavar="CPU=2,GPU=1,memory=8GiB,..."
        ),
    ] = None,
    pserver_resources: Annotated[
        str | None,
        typer.Option(help="Ray: what a parameter server takes. Default: CPU=1.", metavar="CPU=1,..."),
    ] = None,
    node_dir: Annotated[
        Path | None,
        typer.Option(
            help="Ray: logs and scripts on each node go below it. Default: /tmp/trireme-ray.", metavar="PATH"
        ),
    ] = None,
    insecure: Insecure = False,
    detach: Annotated[bool, typer.Option("--detach", help="Run in the background.")] = False,
    as_json: Json = False,
) -> None:
    """Run a cluster on this machine: etcd, masters, and places for the members of jobs that are submitted to
    it.

    It stays in the foreground and shows a line for each job. Ctrl-C, or `trireme down` elsewhere, ends it:
    jobs save a checkpoint, members leave. The same command goes on with all jobs.

    With --launcher ray masters and places run on the nodes of the Ray cluster that this machine belongs to
    (docs/cluster.md).
    """
    given = dict(locals())
    if detach:
        from trireme.cli.cluster.up import up_detached  # noqa: PLC0415

        arguments = [argument for argument in sys.argv[1:] if argument not in ("--detach", "--json")]
        raise typer.Exit(up_detached(arguments, data_dir, as_json=as_json))
    from trireme.cli.cluster.launchers import LauncherRequest  # noqa: PLC0415
    from trireme.cli.cluster.up import UpRequest  # noqa: PLC0415
    from trireme.cli.cluster.up import up as run_up  # noqa: PLC0415

    started_by = LauncherRequest(
        launcher,
        max_trainers,
        max_pservers,
        address,
        node_dir,
        {"trainer": trainer_resources, "pserver": pserver_resources},
    )
    flags = {name: given[name] for name in _PLACES}
    raise typer.Exit(
        run_up(UpRequest(flags, trainers, pservers, as_json, started_by, job_retention_s, insecure))
    )


def down(wait_s: WaitS = 120.0, data_dir: DataDir = None, as_json: Json = False) -> None:
    """End the cluster of `trireme up` in order. Its jobs stay unfinished and go on when it is started
    again."""
    from trireme.cli.cluster.up import down as run_down  # noqa: PLC0415

    raise typer.Exit(run_down(data_dir, wait_s, as_json=as_json))


def submit(
    script: Script,
    name: Annotated[
        str | None,
        typer.Option("--name", "--job", help="Name of the job. Default: the script's name.", metavar="NAME"),
    ] = None,
    min_trainers: Annotated[
        int | None, typer.Option(help="It starts when it can have so many trainers. Default: 1.", metavar="N")
    ] = None,
    max_trainers: Annotated[
        int | None, typer.Option(help="It never gets more. Default: as many as lanes.", metavar="N")
    ] = None,
    pservers: Pservers = None,
    priority: Annotated[
        int | None, typer.Option(help="0 to 100; higher ones go first. Default: 50.", metavar="P")
    ] = None,
    weight: Annotated[
        float | None,
        typer.Option(help="Its share of trainers among jobs of its priority. Default: 1.", metavar="W"),
    ] = None,
    preemptible: Annotated[
        bool, typer.Option("--preemptible", help="A job of a higher priority may stop it; it goes on later.")
    ] = False,
    after: Annotated[
        list[str] | None,
        typer.Option(
            help="Start when that job is COMPLETED; may be given several times.",
            metavar="JOB",
            parser=of_job,
        ),
    ] = None,
    not_before: Annotated[
        str | None,
        typer.Option("--not-before", "--at", help="Start at this time or later (RFC 3339).", metavar="TIME"),
    ] = None,
    cron: Annotated[
        str | None,
        typer.Option(
            help="Begin such a job again and again: minute, hour, day of month, month, day of week.",
            metavar="EXPRESSION",
        ),
    ] = None,
    time_zone: Annotated[
        str | None, typer.Option(help="Of --cron, such as Europe/Berlin. Default: UTC.", metavar="ZONE")
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="If the job of the time before still runs: leave this time out, or cancel that job. "
            "Default: forbid.",
            metavar="forbid|replace",
        ),
    ] = None,
    mode: Mode = None,
    strategy: Strategy = None,
    min_members: MinMembers = None,
    exchange: ExchangeOfJob = None,
    backend: Backend = None,
    reduction: Reduction = None,
    bucket_bytes: BucketBytes = None,
    restart_policy: Restarts = None,
    restart_delay_s: RestartDelayS = None,
    lanes: Lanes = None,
    epochs: Epochs = None,
    init_from: InitFrom = None,
    init_partial: InitPartial = None,
    trackers: Trackers = None,
    init_optimizer: InitOptimizer = None,
    global_batch_size: GlobalBatchSize = None,
    seed: Seed = None,
    push_every: PushEvery = None,
    pull_every: PullEvery = None,
    lr_staleness_modulation: StalenessRate = None,
    max_staleness: MaxStaleness = None,
    device: Device = None,
    gradient_dtype: GradientDtype = None,
    parameter_dtype: ParameterDtype = None,
    storage: Annotated[
        str | None,
        typer.Option(
            help="Its files go to this path or URL, below the cluster's storage or a place that its masters "
            "allow (TRIREME_STORAGE_ALLOWED). Default: the job's name below the cluster's storage.",
            metavar="URL",
        ),
    ] = None,
    pre_task: Annotated[
        list[str] | None,
        typer.Option(
            help="Run before its members are assigned, on an idle one: a shell command, or "
            "pkg.mod:function. Several run in turn.",
            metavar="COMMAND",
        ),
    ] = None,
    post_task: Annotated[
        list[str] | None,
        typer.Option(help="Run once it is COMPLETED, as --pre-task. More: trireme.toml.", metavar="COMMAND"),
    ] = None,
    assignments: Assignments = None,
    check: Check = True,
    wait: Annotated[bool, typer.Option("--wait", help="Show its progress until it has ended.")] = False,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Hand SCRIPT to a cluster as a job. It starts when the cluster has its parameter servers and enough
    trainers for it.

    The script is checked here first and is sent with the job. The cluster is that of TRIREME_URL (or --url;
    its token comes from TRIREME_TOKEN or the file TRIREME_TOKEN_FILE), else the one that runs in the data
    folder. Settings come from where `trireme run` takes them.

    With --cron a schedule is created instead: its jobs are called after it and their time (`trireme
    schedules`).

    With --wait the exit code tells the job's end: 0 COMPLETED, 1 FAILED, 9 CANCELLED.
    """
    given = {
        **locals(),
        "after": tuple(after or ()),
        "preemptible": preemptible or None,
        "not_before_time": not_before,
    }
    given |= {"pre_tasks": pre_task or None, "post_tasks": post_task or None, "trackers": trackers or None}
    if check:
        say_checking(script)
    from trireme.cli.cluster.submit import SubmitRequest  # noqa: PLC0415
    from trireme.cli.cluster.submit import submit as run_submit  # noqa: PLC0415

    request = SubmitRequest(
        script,
        {"job": name, **{setting: given[setting] for setting in _SETTINGS}},
        {field: given[field] for field in _SCHEDULING},
        {field: given[field] for field in _SCHEDULE},
        tuple(assignments or ()),
        data_dir,
        url,
        storage,
        check=check,
        wait=wait,
        as_json=as_json,
    )
    raise typer.Exit(run_submit(request))


def jobs(
    state: Annotated[
        str | None,
        typer.Option(help="Only these.", metavar="queued|active|paused|completed|failed|cancelled"),
    ] = None,
    wide: Annotated[bool, typer.Option("--wide", help="Whole lines, wider than the terminal.")] = False,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """The jobs of a cluster, in the order of their submission.

    A terminal gets what fits. Pipes get whole lines.
    """
    from trireme.cli.cluster.jobs import list_jobs  # noqa: PLC0415

    raise typer.Exit(list_jobs(state, data_dir, url, as_json=as_json, wide=wide))


def job_tasks(
    job: JobName,
    task: Annotated[
        str | None, typer.Argument(metavar="TASK", help="Show the end of its output, such as pre-0.")
    ] = None,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """The pre- and post-tasks of a job of a cluster, how each stands, or the output of one."""
    from trireme.cli.cluster.jobs import list_job_tasks  # noqa: PLC0415

    raise typer.Exit(list_job_tasks(job, task, data_dir, url, as_json=as_json))


def pause(
    job: JobName, wait_s: WaitS = 60.0, data_dir: DataDir = None, url: Url = None, as_json: Json = False
) -> None:
    """Stop a job of a cluster with a checkpoint. Its members become free; `trireme resume` goes on."""
    from trireme.cli.cluster.jobs import act  # noqa: PLC0415

    raise typer.Exit(act(job, "pause", wait_s, data_dir, url, as_json=as_json))


def resume(
    job: JobName, wait_s: WaitS = 60.0, data_dir: DataDir = None, url: Url = None, as_json: Json = False
) -> None:
    """Queue a paused job again, or one that failed for lack of members, storage or dataset. It goes on from
    its checkpoint."""
    from trireme.cli.cluster.jobs import act  # noqa: PLC0415

    raise typer.Exit(act(job, "resume", wait_s, data_dir, url, as_json=as_json))


def cancel(
    job: JobName, wait_s: WaitS = 60.0, data_dir: DataDir = None, url: Url = None, as_json: Json = False
) -> None:
    """Stop a job of a cluster for good. Its checkpoints stay until it is deleted."""
    from trireme.cli.cluster.jobs import act  # noqa: PLC0415

    raise typer.Exit(act(job, "cancel", wait_s, data_dir, url, as_json=as_json))


def delete(job: JobName, data_dir: DataDir = None, url: Url = None, as_json: Json = False) -> None:
    """Delete a job of a cluster that has ended: its keys, and its files below the cluster's storage."""
    from trireme.cli.cluster.jobs import delete as run_delete  # noqa: PLC0415

    raise typer.Exit(run_delete(job, data_dir, url, as_json=as_json))


@schedules.callback(invoke_without_command=True)
def _schedules(
    context: typer.Context, data_dir: DataDir = None, url: Url = None, as_json: Json = False
) -> None:
    """The schedules of a cluster (`trireme submit --cron`): when each begins its next job, and what became of
    the last one."""
    if context.invoked_subcommand is None:
        from trireme.cli.cluster.jobs import list_schedules  # noqa: PLC0415

        raise typer.Exit(list_schedules(data_dir, url, as_json=as_json))


@schedules.command("delete")
def _delete_schedule(
    name: Annotated[str, typer.Argument(metavar="NAME", parser=of_job)],
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """No more jobs begin; those that began go on."""
    from trireme.cli.cluster.jobs import delete_schedule  # noqa: PLC0415

    raise typer.Exit(delete_schedule(name, data_dir, url, as_json=as_json))


@pool.callback(invoke_without_command=True)
def _pool(context: typer.Context, data_dir: DataDir = None, url: Url = None, as_json: Json = False) -> None:
    """The places of a cluster for trainers and parameter servers, and which job each has."""
    if context.invoked_subcommand is None:
        from trireme.cli.cluster.jobs import list_pool  # noqa: PLC0415

        raise typer.Exit(list_pool(data_dir, url, as_json=as_json))


@pool.command("drain")
def _drain(
    member: _Member, wait_s: WaitS = 60.0, data_dir: DataDir = None, url: Url = None, as_json: Json = False
) -> None:
    """Give a place no work any more. What it runs hands over and leaves; jobs go on with other places."""
    from trireme.cli.cluster.jobs import drain as run_drain  # noqa: PLC0415

    raise typer.Exit(run_drain(member, wait_s, data_dir, url, as_json=as_json))


@pool.command("undrain")
def _undrain(member: _Member, data_dir: DataDir = None, url: Url = None, as_json: Json = False) -> None:
    """Let a drained place work again."""
    from trireme.cli.cluster.jobs import undrain as run_undrain  # noqa: PLC0415

    raise typer.Exit(run_undrain(member, data_dir, url, as_json=as_json))

"""`trireme`: the command line. Data on stdout, everything else on stderr; this module loads neither torch nor
pydantic.

Exit codes: 0 ok, 1 job failed, 2 usage, 3 not found, 4 conflict, 5 auth, 6 unreachable, 7 wait timed out, 8
disk full (resumable), 9 cancelled, 10 etcd's files are damaged, 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from trireme.cli import standard_output
from trireme.cli.cluster import commands as cluster_commands
from trireme.cli.history import commands as history_commands
from trireme.cli.options import (
    CLUSTER,
    REPAIR,
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
    Job,
    Json,
    Lanes,
    MaxStaleness,
    MinMembers,
    Mode,
    Named,
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
    Tables,
    Trackers,
    Url,
    WaitS,
    say_checking,
)
from trireme.cli.other_systems import WithOtherNames
from trireme.cli.tables import commands as table_commands
from trireme_shared import __version__

app = typer.Typer(
    name="trireme",
    help="Elastic, fault-tolerant training of PyTorch models on machines that may disappear at any time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # lines of a docstring are joined
)
chaos = typer.Typer(
    help="Kill processes of a running local job and see how it recovers.", no_args_is_help=True
)
checkpoint = typer.Typer(help="Checkpoints of a job, running or not.", no_args_is_help=True)
token = typer.Typer(
    help="Tokens of a run or a cluster on this machine. Changes count within a second, without a restart.",
    no_args_is_help=True,
)

# of `trireme run`
_NOT_SETTINGS = {
    "script",
    "assignments",
    "check",
    "fresh",
    "accept_changes",
    "dry_run",
    "as_json",
    "insecure",
}
_WHICH = typer.Argument(help="A step, or the beginning of a checkpoint's uuid.", metavar="CHECKPOINT")
Which = Annotated[str | None, _WHICH]
File = Annotated[
    Path | None,
    typer.Option(
        "--file",
        help="A table of tokens that services started by hand read (TRIREME_TOKENS_FILE).",
        metavar="FILE",
    ),
]
TokenName = Annotated[str, typer.Argument(help="Name of the token.", metavar="NAME")]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"trireme {__version__}")  # noqa: T201
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass  # the help is that of the app


@app.command(cls=WithOtherNames, rich_help_panel=START)
def run(
    script: Script,
    mode: Mode = None,
    strategy: Strategy = None,
    dispatch: Annotated[
        str | None,
        typer.Option(
            help="Who keeps the task queue: a master, or the trainers themselves (etcd).",
            metavar="master|etcd",
        ),
    ] = None,
    trainers: Annotated[int | None, typer.Option(help="Number of trainers.", metavar="N")] = None,
    pservers: Pservers = None,
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
    job: Annotated[
        str | None, typer.Option(help="Name of the job. Default: the script's name.", metavar="NAME")
    ] = None,
    data_dir: DataDir = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the master's REST API. Default: any free port.", metavar="P")
    ] = None,
    standbys: Annotated[int | None, typer.Option(help="Number of standby masters.", metavar="N")] = None,
    spare_pservers: Annotated[
        int | None,
        typer.Option(
            help="Number of spare parameter servers; a spare takes over when another one dies.", metavar="N"
        ),
    ] = None,
    etcd: Etcd = None,
    etcd_user: EtcdUser = None,
    etcd_password_file: EtcdPasswordFile = None,
    etcd_ca: EtcdCa = None,
    etcd_cert: EtcdCert = None,
    etcd_key: EtcdKey = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address at which members listen. Default: 127.0.0.1.", metavar="ADDRESS"),
    ] = None,
    advertise: Advertise = None,
    storage: Annotated[
        str | None,
        typer.Option(
            help="Write checkpoints and exports below this path or URL (s3://bucket/runs) instead of "
            "the job's folder.",
            metavar="URL",
        ),
    ] = None,
    assignments: Assignments = None,
    check: Check = True,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="Start from the beginning; the files of the last run move to previous/ in the job's folder.",
        ),
    ] = False,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="Go on from the last checkpoint with other hyperparameters than before: learning rate, "
            "weight decay, schedule, batch size, ...",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the job's spec as JSON and start nothing.")
    ] = False,
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Train SCRIPT on this machine: etcd, master, parameter servers and trainers run as supervised processes.

    A setting comes from the first of: flag, environment (TRIREME_EPOCHS, ...), trireme.toml, the script's
    config, default.

    Run the same command again after a stop:
    - An unfinished job resumes from its last checkpoint. The numbers of trainers and parameter servers may
      differ (with
    independent checkpoints only that of trainers); other hyperparameters need --accept-changes.
    - A completed job is not trained again.
    - A job that failed because members, its storage or its dataset were away resumes, too.
    - A job whose script failed starts from the beginning, as any job does with --fresh. The files of its last
      run are kept
    in previous/ in the job's folder.

    Names of ElasticDL's and PaddlePaddle's command lines are taken where they mean the same:
    docs/migration.md.
    """
    given = {**locals(), "trackers": trackers or None}
    if check:
        say_checking(script)
    from trireme.cli.run import RunRequest, run_command  # noqa: PLC0415

    flags = {name: value for name, value in given.items() if name not in _NOT_SETTINGS}
    request = RunRequest(
        script,
        flags,
        tuple(assignments or ()),
        check=check,
        dry_run=dry_run,
        fresh=fresh,
        accept_changes=accept_changes,
        as_json=as_json,
        insecure=insecure,
    )
    raise typer.Exit(run_command(request))


@app.command(rich_help_panel=WATCH)
def status(
    named: Named = None, job: Job = None, data_dir: DataDir = None, url: Url = None, as_json: Json = False
) -> None:
    """Phase, progress and members of a job."""
    from trireme.cli.queries import ask, show_status  # noqa: PLC0415

    raise typer.Exit(ask(show_status, named or job, data_dir, url, as_json=as_json))


@app.command(rich_help_panel=WATCH)
def tasks(
    state: Annotated[
        str | None, typer.Option(help="Only these.", metavar="todo|pending|requeued|discarded")
    ] = None,
    named: Named = None,
    job: Job = None,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """The task queue: which trainer has which task, which tasks were discarded and why."""
    from trireme.cli.queries import ask, show_tasks  # noqa: PLC0415

    raise typer.Exit(ask(show_tasks, named or job, data_dir, url, as_json=as_json, state=state))


@app.command(rich_help_panel=WATCH)
def members(
    named: Named = None, job: Job = None, data_dir: DataDir = None, url: Url = None, as_json: Json = False
) -> None:
    """Parameter servers and trainers that are alive."""
    from trireme.cli.queries import ask, show_members  # noqa: PLC0415

    raise typer.Exit(ask(show_members, named or job, data_dir, url, as_json=as_json))


history_commands.register(app)
cluster_commands.add_to(app)  # before the commands that follow: the groups of the help come in this order
table_commands.register(app)
app.add_typer(token, name="token", rich_help_panel=CLUSTER)


@app.command(rich_help_panel=REPAIR)
def explain(
    job: Named = None,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Why a job does not progress, and what to do; also for a job that ended, was stopped, or has no master.

    With TRIREME_ETCD set and a JOB named, the job's master is found in that etcd.
    """
    from trireme.cli.explain import explain as run_explain  # noqa: PLC0415

    raise typer.Exit(run_explain(job, data_dir, url, as_json=as_json))


@app.command(rich_help_panel=START)
def scale(
    named: Named = None,
    trainers: Annotated[int | None, typer.Option(help="Number of trainers from now on.", metavar="N")] = None,
    pservers: Annotated[
        int | None, typer.Option(help="Number of parameter servers from now on.", metavar="M")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would move.")] = False,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="By a checkpoint that all parameter servers load, instead of live."),
    ] = False,
    wait_s: WaitS = 300.0,
    job: Job = None,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Change the numbers of trainers and parameter servers of a running job. Training goes on meanwhile, with
    the same bits.

    Exit code 7: not finished within --wait-s; the resize goes on.
    """
    if trainers is None and pservers is None:
        raise typer.BadParameter("give --trainers, --pservers, or both")
    from trireme.cli.scale import scale as run_scale  # noqa: PLC0415

    asked = {
        "trainers": trainers,
        "pservers": pservers,
        "strategy": "restart" if restart else "live",
    }
    raise typer.Exit(run_scale(named or job, data_dir, url, asked, wait_s, dry_run=dry_run, as_json=as_json))


@app.command(rich_help_panel=WATCH)
def export(
    which: Which = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Folder or URL for the files. Default: export-step-N in the job's folder.", metavar="DIR"
        ),
    ] = None,
    optimizer: Annotated[
        bool,
        typer.Option(
            "--optimizer", help="Write the state of the optimizer and the scheduler, too: training.pt."
        ),
    ] = False,
    tables: Tables = "safetensors",
    job: Job = None,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint (the newest, if none is named) as model.safetensors and model.pt, which plain
    PyTorch loads.

    Loads the job's script to build the model; the script must be the one the checkpoint was made with.
    The script of a job in a cluster is fetched and runs here.
    """
    from trireme.cli.export import export as run_export  # noqa: PLC0415

    raise typer.Exit(
        run_export(job, data_dir, which, out, url, optimizer=optimizer, tables=tables, as_json=as_json)
    )


@chaos.command("kill")
def chaos_kill(
    name: Annotated[
        str | None, typer.Argument(help="trainer-0, pserver-1, master-0, etcd, ...", metavar="[NAME]")
    ] = None,
    at_random: Annotated[bool, typer.Option("--random", help="Any process of the job.")] = False,
    job: Job = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Send SIGKILL to a process of a running local job. Prints how it was noticed, when training went on and
    what it cost."""
    if (name is None) is not at_random:
        raise typer.BadParameter("give either a NAME or --random")
    from trireme.cli.chaos import kill  # noqa: PLC0415

    raise typer.Exit(kill(name, job, data_dir, at_random=at_random, as_json=as_json))


@app.command(rich_help_panel=REPAIR)
def version(as_json: Json = False) -> None:
    """Versions of Trireme, Python and the packages it uses."""
    from trireme.cli.version import show_version  # noqa: PLC0415

    show_version(as_json=as_json)


@app.command(rich_help_panel=REPAIR)
def doctor(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Check this machine (versions, etcd, ports, data directory) and print how long a recovery may take."""
    from trireme.cli.doctor import examine  # noqa: PLC0415

    raise typer.Exit(examine(data_dir, as_json=as_json))


@app.command(rich_help_panel=CLUSTER)
def certs(
    folder: Annotated[
        Path, typer.Argument(help="Folder of the authority: made if it is not there.", metavar="DIR")
    ],
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            help="A name or address that the certificate is for, besides this machine's.",
            metavar="HOST",
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Of the certificate's files.", metavar="NAME")] = "trireme",
    days: Annotated[int, typer.Option(help="For which it is valid, up to 825.", metavar="N")] = 365,
    renew: Annotated[
        bool, typer.Option("--renew", help="Only replace a certificate that is there, for the same hosts.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a small certificate authority, or a further certificate of it, for TLS between members, masters
    and commands.

    Prints the environment variables that use them. A name that is there already gets a new certificate;
    services take it up.
    """
    from trireme.cli.security import make_certificates  # noqa: PLC0415

    raise typer.Exit(make_certificates(folder, name, hosts or [], days, renew=renew, as_json=as_json))


@checkpoint.command(name="list")
def checkpoint_list(
    job: Job = None, data_dir: DataDir = None, url: Url = None, as_json: Json = False
) -> None:
    """The checkpoints of a job, newest first. This machine must see its storage."""
    from trireme.cli.checkpoint import list_checkpoints  # noqa: PLC0415

    raise typer.Exit(list_checkpoints(job, data_dir, url, as_json=as_json))


@checkpoint.command(name="create")
def checkpoint_create(
    wait_s: WaitS = 120.0, job: Job = None, data_dir: DataDir = None, url: Url = None, as_json: Json = False
) -> None:
    """Make a checkpoint of a running job at one of its next steps; in synchronous mode training does not stop
    for it.

    Prints the operation and its checkpoint. Exit code 7: not finished within --wait-s; the operation goes on.
    """
    from trireme.cli.checkpoint import create  # noqa: PLC0415

    raise typer.Exit(create(job, data_dir, url, wait_s, as_json=as_json))


@checkpoint.command(name="restore")
def checkpoint_restore(
    which: Annotated[str, _WHICH],
    wait_s: WaitS = 120.0,
    job: Job = None,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Take a running job back to a checkpoint. Training continues from there and ends with the same bits.

    Training is not stopped before the checkpoint's files are verified; exit code 1 if they are damaged. Newer
    checkpoints are kept and can be restored later.
    """
    from trireme.cli.checkpoint import restore  # noqa: PLC0415

    raise typer.Exit(restore(job, data_dir, url, which, wait_s, as_json=as_json))


@checkpoint.command(name="verify")
def checkpoint_verify(
    which: Which = None, job: Job = None, data_dir: DataDir = None, url: Url = None, as_json: Json = False
) -> None:
    """Read every file of a checkpoint (of all, if none is named) and compare its checksum; exit code 1 if one
    is damaged."""
    from trireme.cli.checkpoint import verify  # noqa: PLC0415

    raise typer.Exit(verify(job, data_dir, which, url, as_json=as_json))


@token.command("list")
def token_list(job: Job = None, data_dir: DataDir = None, file: File = None, as_json: Json = False) -> None:
    """Names and roles of the tokens, and since when they exist."""
    from trireme.cli.security import Where, list_tokens  # noqa: PLC0415

    raise typer.Exit(list_tokens(Where(file, job, data_dir), as_json=as_json))


@token.command("create")
def token_create(
    name: TokenName,
    role: Annotated[
        str, typer.Option(help="viewer: read; member: what members need; admin: everything.", metavar="ROLE")
    ] = "viewer",
    valid_s: Annotated[
        float | None,
        typer.Option("--valid-s", help="For so many seconds. Default: for ever.", min=1, metavar="S"),
    ] = None,
    job: Job = None,
    data_dir: DataDir = None,
    file: File = None,
    as_json: Json = False,
) -> None:
    """Make a token and print it. It is kept as a hash and cannot be shown again."""
    from trireme.cli.security import Where, create_token  # noqa: PLC0415

    raise typer.Exit(create_token(Where(file, job, data_dir), name, role, valid_s, as_json=as_json))


@token.command("rotate")
def token_rotate(
    name: TokenName,
    keep_s: Annotated[
        float,
        typer.Option("--keep-s", help="The old token is taken for so many seconds more.", min=0, metavar="S"),
    ] = 60.0,
    job: Job = None,
    data_dir: DataDir = None,
    file: File = None,
    as_json: Json = False,
) -> None:
    """Print a new token of the same role in the place of another one. Running members take up theirs by
    themselves."""
    from trireme.cli.security import Where, rotate_token  # noqa: PLC0415

    raise typer.Exit(rotate_token(Where(file, job, data_dir), name, keep_s, as_json=as_json))


@token.command("revoke")
def token_revoke(
    name: TokenName, job: Job = None, data_dir: DataDir = None, file: File = None, as_json: Json = False
) -> None:
    """Refuse a token from now on."""
    from trireme.cli.security import Where, revoke_token  # noqa: PLC0415

    raise typer.Exit(revoke_token(Where(file, job, data_dir), name, as_json=as_json))


app.add_typer(checkpoint, name="checkpoint", rich_help_panel=REPAIR)
app.add_typer(chaos, name="chaos", rich_help_panel=REPAIR)


def main() -> None:
    standard_output.begin()
    code: standard_output.Code = 0
    try:
        app()
    except SystemExit as ended:
        code = ended.code
    finally:
        # from here on Ctrl-C ends the process: as an exception it would be printed by whatever the
        # interpreter frees just then
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(standard_output.end(code))

"""The commands about logs, events and metrics (TensorBoard, too): their options. This module loads neither
torch nor pydantic."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trireme.cli.options import WATCH, DataDir, Form, Job, Json, Named, Trackers, Url, of_job

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")]


def register(app: typer.Typer) -> None:
    app.command("logs", rich_help_panel=WATCH)(logs)
    app.command("events", rich_help_panel=WATCH)(events)
    app.command("metrics", rich_help_panel=WATCH)(metrics)
    app.command("list", rich_help_panel=WATCH)(list_runs)
    app.command("tensorboard", rich_help_panel=WATCH)(tensorboard)
    app.command("track", rich_help_panel=WATCH)(track)
    app.command("dashboard", rich_help_panel=WATCH)(dashboard)


def dashboard(
    named: Named = None,
    print_only: Annotated[
        bool,
        typer.Option("--print", help="Print the address, for a browser elsewhere. It is good once."),
    ] = False,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Open the dashboard of what runs here, or of one job, in a browser that is logged in."""
    from trireme.cli.dashboard import open_dashboard  # noqa: PLC0415

    raise typer.Exit(open_dashboard(named, data_dir, url, print_only=print_only, as_json=as_json))


def logs(
    member: Annotated[
        str | None,
        typer.Argument(
            help="trainer-0, pserver, master-0, etcd, ... Default: all, in the order of time.",
            metavar="[MEMBER]",
        ),
    ] = None,
    follow: Follow = False,
    since: Annotated[
        str | None,
        typer.Option(help="Only lines since then: 90s, 10m, 2h, 1d, or an RFC 3339 time.", metavar="TIME"),
    ] = None,
    tail: Annotated[
        int, typer.Option(help="At most so many lines of before.", min=0, max=1_000_000, metavar="N")
    ] = 200,
    job: Job = None,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """What members wrote, dead ones included: their logs, and what the script printed. Of members on this
    machine, or with --url or TRIREME_URL of those on the master's."""
    from trireme.cli.history.logs import logs as show  # noqa: PLC0415

    raise typer.Exit(show(member, job, data_dir, url, follow=follow, since=since, tail=tail, as_json=as_json))


def events(
    named: Named = None,
    follow: Follow = False,
    after: Annotated[int, typer.Option(help="Only those with a larger id.", min=0, metavar="ID")] = 0,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """What happened to a job: one line for each event that is kept; with --json one object for each."""
    from trireme.cli.history.logs import events as show  # noqa: PLC0415

    raise typer.Exit(show(named, data_dir, url, after=after, follow=follow, as_json=as_json))


def metrics(
    named: Named = None,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--name", help="Only this metric, or those like 'time.*'; several times for more.", metavar="NAME"
        ),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="All points as CSV.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="All points as one JSON object; with --follow one a line.")
    ] = False,
    by: Annotated[
        str, typer.Option("--by", help="A point for each step, or for each epoch.", metavar="step|epoch")
    ] = "step",
    plot: Annotated[bool, typer.Option("--plot", help="A chart of each metric by step.")] = False,
    follow: Follow = False,
    job: Job = None,
    data_dir: DataDir = None,
    url: Url = None,
) -> None:
    """What was measured step by step: loss, what the script logs, learning rate, ... The job may run, or have
    ended.

    Default: a table of the last values. A chart without --name shows losses, the script's own metrics and
    evaluations.
    """
    if as_csv + as_json + plot > 1:
        raise typer.BadParameter("give one of --csv, --json and --plot")
    if by not in ("step", "epoch"):
        raise typer.BadParameter(f"--by {by}: give step or epoch")
    form: Form = "csv" if as_csv else "json" if as_json else "plot" if plot else "table"
    from trireme.cli.history.metrics import metrics as show  # noqa: PLC0415

    raise typer.Exit(show(named or job, data_dir, url, names or [], form, by=by, follow=follow))


def tensorboard(
    jobs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names of jobs. Default: the one started last.", metavar="[JOB]...", parser=of_job
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="Of TensorBoard.", min=1, max=65535, metavar="P")] = 6006,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Only write event files of what is known now below this folder.", metavar="DIR"
        ),
    ] = None,
    data_dir: DataDir = None,
    url: Url = None,
) -> None:
    """TensorBoard on this machine, with the metrics of jobs that run or have ended; it follows them until
    Ctrl-C.

    Needs `pip install 'trireme[tensorboard]'`.
    """
    from trireme.cli.history.metrics import tensorboard as show  # noqa: PLC0415

    raise typer.Exit(show(jobs or [], data_dir, url, port=port, out=out))


def track(
    named: Named = None,
    trackers: Trackers = None,
    limit_s: Annotated[
        float, typer.Option("--limit-s", help="Seconds to wait for the trackers.", min=1, metavar="S")
    ] = 600.0,
    job: Job = None,
    data_dir: DataDir = None,
    url: Url = None,
) -> None:
    """Bring the trackers of a job that has ended up to date, or send all of it to other ones (--tracker).

    While a job trains its leader does this. What a tracker has already is not sent again.
    """
    from trireme.cli.history.trackers import track as bring  # noqa: PLC0415

    raise typer.Exit(bring(named or job, data_dir, url, trackers or [], limit_s))


def list_runs(data_dir: DataDir = None, as_json: Json = False) -> None:
    """The runs of this folder, newest first: name, state, when they started and ended, result, folder.

    RUNNING, COMPLETED, FAILED, or STOPPED: unfinished, and nobody runs it now; the command that started it
    resumes it.
    """
    from trireme.cli.queries import list_runs as show  # noqa: PLC0415

    raise typer.Exit(show(data_dir, as_json=as_json))

"""The commands about logs and events: their options. This module loads neither torch nor pydantic."""

from __future__ import annotations

from typing import Annotated

import typer

from trireme.cli.options import DataDir, Job, Json, Named, Url

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")]


def register(app: typer.Typer) -> None:
    app.command("logs")(logs)
    app.command("events")(events)


def logs(
    member: Annotated[
        str | None,
        typer.Argument(
            help="trainer-0, pserver, master-0, etcd, ... Default: all, in the order of time.", metavar="[MEMBER]"
        ),
    ] = None,
    follow: Follow = False,
    since: Annotated[
        str | None, typer.Option(help="Only lines since then: 90s, 10m, 2h, 1d, or an RFC 3339 time.", metavar="TIME")
    ] = None,
    tail: Annotated[
        int, typer.Option(help="At most so many lines of before.", min=0, max=1_000_000, metavar="N")
    ] = 200,
    job: Job = None,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """What members wrote, dead ones included: their logs, and what the script printed. Of members on this machine, or with --url or
    TRIREME_URL of those on the master's."""
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

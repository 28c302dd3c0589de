"""The commands about clusters that have commands below them, `schedules` and `pool`: their options. Loads neither torch nor pydantic."""

from __future__ import annotations

from typing import Annotated

import typer

from trireme.cli.options import DataDir, Json, Url, WaitS

schedules = typer.Typer(name="schedules", no_args_is_help=False)


@schedules.callback(invoke_without_command=True)
def _schedules(context: typer.Context, data_dir: DataDir = None, url: Url = None, as_json: Json = False) -> None:
    """The schedules of a cluster (`trireme submit --cron`): when each begins its next job, and what became of the last one."""
    if context.invoked_subcommand is None:
        from trireme.cli.cluster.jobs import list_schedules  # noqa: PLC0415

        raise typer.Exit(list_schedules(data_dir, url, as_json=as_json))


@schedules.command("delete")
def _delete_schedule(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """No more jobs begin; those that began go on."""
    from trireme.cli.cluster.jobs import delete_schedule  # noqa: PLC0415

    raise typer.Exit(delete_schedule(name, data_dir, url, as_json=as_json))


pool = typer.Typer(name="pool", no_args_is_help=False)
_Member = Annotated[str, typer.Argument(metavar="MEMBER", help="Its member_id in `trireme pool`.")]


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

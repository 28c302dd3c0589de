"""`trireme checkpoint ...`: its options. What it does is in trireme.cli.checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from trireme.cli.options import DataDir, Job, Json, Url, WaitS

_WHICH = typer.Argument(help="A step, or the beginning of a checkpoint's uuid.", metavar="CHECKPOINT")
Which = Annotated[str | None, _WHICH]
checkpoint = typer.Typer(help="Checkpoints of a job, running or not.", no_args_is_help=True)


@checkpoint.command(name="list")
def checkpoint_list(job: Job = None, data_dir: DataDir = None, url: Url = None, as_json: Json = False) -> None:
    """The checkpoints of a job, newest first. This machine must see its storage."""
    from trireme.cli.checkpoint import list_checkpoints  # noqa: PLC0415

    raise typer.Exit(list_checkpoints(job, data_dir, url, as_json=as_json))


@checkpoint.command(name="create")
def checkpoint_create(
    wait_s: WaitS = 120.0, job: Job = None, data_dir: DataDir = None, url: Url = None, as_json: Json = False
) -> None:
    """Make a checkpoint of a running job at one of its next steps; in synchronous mode training does not stop for it.

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

    Training is not stopped before the checkpoint's files are verified; exit code 1 if they are damaged. Newer checkpoints
    are kept and can be restored later.
    """
    from trireme.cli.checkpoint import restore  # noqa: PLC0415

    raise typer.Exit(restore(job, data_dir, url, which, wait_s, as_json=as_json))


@checkpoint.command(name="verify")
def checkpoint_verify(
    which: Which = None, job: Job = None, data_dir: DataDir = None, url: Url = None, as_json: Json = False
) -> None:
    """Read every file of a checkpoint (of all, if none is named) and compare its checksum; exit code 1 if one is damaged."""
    from trireme.cli.checkpoint import verify  # noqa: PLC0415

    raise typer.Exit(verify(job, data_dir, which, url, as_json=as_json))

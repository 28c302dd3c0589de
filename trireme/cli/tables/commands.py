"""`trireme table`: its commands and their options. This module loads neither torch nor pydantic."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from trireme.cli.options import WATCH, DataDir, Job, Json, Named, Url

table = typer.Typer(
    help="Embedding tables of a job, running or not, as they are in its newest checkpoint; and what one "
    "will take (plan).",
    no_args_is_help=True,
)
Name = Annotated[str, typer.Argument(help="Name of the table.", metavar="NAME")]


def register(app: typer.Typer) -> None:
    app.add_typer(table, name="table", rich_help_panel=WATCH)


@table.command()
def stats(named: Named = None, data_dir: DataDir = None, url: Url = None, as_json: Json = False) -> None:
    """How many rows each table has, their size, and when they were trained. This machine must see the job's
    storage."""
    from trireme.cli.tables.show import stats as show  # noqa: PLC0415

    raise typer.Exit(show(named, data_dir, url, as_json=as_json))


# so that negative ids are no options
@table.command(context_settings={"ignore_unknown_options": True})
def get(
    name: Name,
    ids: Annotated[list[str], typer.Argument(help="Whole numbers.", metavar="ID...")],
    job: Job = None,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """The rows of some ids. An id without a row has its initial values."""
    from trireme.cli.tables.show import get as show  # noqa: PLC0415

    raise typer.Exit(show(job, data_dir, url, name, ids, as_json=as_json))


@table.command()
def top(
    name: Name,
    by: Annotated[
        Literal["frequency", "step", "norm"],
        typer.Option(help="Trained in the most minibatches, trained last, or with the largest values."),
    ] = "frequency",
    count: Annotated[
        int, typer.Option("--count", "-n", help="So many rows.", min=1, max=100_000, metavar="N")
    ] = 10,
    job: Job = None,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """The rows that come first by some measure."""
    from trireme.cli.tables.show import top as show  # noqa: PLC0415

    raise typer.Exit(show(job, data_dir, url, name, by, count, as_json=as_json))


@table.command()
def plan(
    rows: Annotated[int, typer.Argument(help="So many rows.", min=1, max=2**40, metavar="ROWS")],
    dim: Annotated[int, typer.Option("--dim", help="Numbers of a row.", min=1, max=4096, metavar="N")] = 16,
    optimizer: Annotated[
        Literal["sgd", "adagrad", "adagrad-row", "adam", "ftrl"],
        typer.Option(help="adagrad-row: with per_row."),
    ] = "adagrad",
    pservers: Annotated[int, typer.Option(help="Parameter servers.", min=1, max=1024, metavar="N")] = 1,
    ids: Annotated[
        int, typer.Option(help="Ids of a minibatch that differ.", min=0, max=10**8, metavar="N")
    ] = 100_000,
    lanes: Annotated[int, typer.Option(help="Lanes of the job.", min=1, max=1024, metavar="N")] = 1,
    limited: Annotated[bool, typer.Option("--limited", help="The table has max_rows.")] = False,
    as_json: Json = False,
) -> None:
    """How much memory a table of so many rows takes at each parameter server, at most. Needs no job."""
    from trireme.cli.tables.memory import plan as show  # noqa: PLC0415

    raise typer.Exit(show(rows, dim, optimizer, pservers, ids, lanes, limited=limited, as_json=as_json))


Out = Annotated[str, typer.Option("--out", help="Folder or URL.", metavar="FOLDER")]


@table.command()
def delta(
    out: Out,
    named: Named = None,
    since: Annotated[
        str | None,
        typer.Option(
            help="Step or uuid. Default: where the last folder ends; all rows if there is none.",
            metavar="STEP",
        ),
    ] = None,
    to: Annotated[
        str | None, typer.Option(help="Step or uuid. Default: the newest checkpoint.", metavar="STEP")
    ] = None,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Write what changed in all tables between two checkpoints as the next numbered folder."""
    from trireme.cli.tables.feed import delta as write  # noqa: PLC0415

    raise typer.Exit(write(named, data_dir, url, since, to, out, as_json=as_json))


@table.command()
def feed(
    out: Out,
    named: Named = None,
    serving_delta_seconds: Annotated[
        float, typer.Option(help="A checkpoint and a folder so often.", min=1, metavar="S")
    ] = 60.0,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Feed online serving: write a numbered folder with the changes again and again, until the job is
    over."""
    from trireme.cli.tables.feed import feed as follow  # noqa: PLC0415

    raise typer.Exit(follow(named, data_dir, url, out, serving_delta_seconds, as_json=as_json))


@table.command()
def apply(
    base: Annotated[str, typer.Argument(help="Folder of an export, with tables/ in it.", metavar="EXPORT")],
    deltas: Annotated[
        list[str], typer.Argument(help="Folders of deltas, or of a whole feed.", metavar="DELTA...")
    ],
    out: Out,
    as_json: Json = False,
) -> None:
    """Bring the tables of an export to the version of the last delta."""
    from trireme.cli.tables.feed import apply as bring  # noqa: PLC0415

    raise typer.Exit(bring(base, deltas, out, as_json=as_json))

"""The commands about tokens: their options. This module loads neither torch nor pydantic."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trireme.cli.options import DataDir, Job, Json

token = typer.Typer(
    help="Tokens of a run or a cluster on this machine. Changes count within a second, without a restart.",
    no_args_is_help=True,
)

File = Annotated[
    Path | None,
    typer.Option(
        "--file", help="A table of tokens that services started by hand read (TRIREME_TOKENS_FILE).", metavar="FILE"
    ),
]
TokenName = Annotated[str, typer.Argument(help="Name of the token.", metavar="NAME")]


@token.command("list")
def token_list(job: Job = None, data_dir: DataDir = None, file: File = None, as_json: Json = False) -> None:
    """Names and roles of the tokens, and since when they exist."""
    from trireme.cli.security.tokens import Where, list_tokens  # noqa: PLC0415

    raise typer.Exit(list_tokens(Where(file, job, data_dir), as_json=as_json))


@token.command("create")
def token_create(
    name: TokenName,
    role: Annotated[
        str, typer.Option(help="viewer: read; member: what members need; admin: everything.", metavar="ROLE")
    ] = "viewer",
    valid_s: Annotated[
        float | None, typer.Option("--valid-s", help="For so many seconds. Default: for ever.", min=1, metavar="S")
    ] = None,
    job: Job = None,
    data_dir: DataDir = None,
    file: File = None,
    as_json: Json = False,
) -> None:
    """Make a token and print it. It is kept as a hash and cannot be shown again."""
    from trireme.cli.security.tokens import Where, create_token  # noqa: PLC0415

    raise typer.Exit(create_token(Where(file, job, data_dir), name, role, valid_s, as_json=as_json))


@token.command("rotate")
def token_rotate(
    name: TokenName,
    keep_s: Annotated[
        float, typer.Option("--keep-s", help="The old token is taken for so many seconds more.", min=0, metavar="S")
    ] = 60.0,
    job: Job = None,
    data_dir: DataDir = None,
    file: File = None,
    as_json: Json = False,
) -> None:
    """Print a new token of the same role in the place of another one. Running members take up theirs by themselves."""
    from trireme.cli.security.tokens import Where, rotate_token  # noqa: PLC0415

    raise typer.Exit(rotate_token(Where(file, job, data_dir), name, keep_s, as_json=as_json))


@token.command("revoke")
def token_revoke(
    name: TokenName, job: Job = None, data_dir: DataDir = None, file: File = None, as_json: Json = False
) -> None:
    """Refuse a token from now on."""
    from trireme.cli.security.tokens import Where, revoke_token  # noqa: PLC0415

    raise typer.Exit(revoke_token(Where(file, job, data_dir), name, as_json=as_json))

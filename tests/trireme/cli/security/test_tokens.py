"""`trireme token`: which table a command means, what it prints, and what its exit codes are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trireme.cli import exit_codes
from trireme.cli.app import app
from trireme.launch import run_folder
from trireme.pool import cluster_folder
from trireme_shared.platform.security.tokens import Role, TokenFolder, Tokens


@pytest.fixture
def run(tmp_path: Path) -> TokenFolder:
    """The tokens of a run of the job `a` that has ended."""
    folder = tmp_path / "a"
    tokens = TokenFolder(folder)
    tokens.prepare()
    run_folder.write_json(folder / run_folder.RUN_FILE, {"job": "a", "url": "http://127.0.0.1:1"})
    return tokens


def trireme(data_dir: Path, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["token", *arguments, "--data-dir", str(data_dir)])
    assert "Traceback" not in done.output, done.output
    return done.exit_code, done.output


def shown(data_dir: Path, *arguments: str) -> Any:
    code, output = trireme(data_dir, *arguments, "--json")
    assert code == exit_codes.OK, output
    return json.loads(output)


def test_tokens_of_a_run_are_created_listed_rotated_and_revoked(tmp_path: Path, run: TokenFolder) -> None:
    created = shown(tmp_path, "create", "dashboard", "--valid-s", "1000")
    assert Tokens(run.table).role_of(created["token"]) is Role.VIEWER
    listed = shown(tmp_path, "list")
    assert [(each["name"], each["role"]) for each in listed["tokens"]] == [
        ("admin", "admin"), ("member", "member"), ("viewer", "viewer"), ("dashboard", "viewer"),
    ]  # fmt: skip
    assert created["token"] not in json.dumps(listed)
    assert "sha256" not in json.dumps(listed)
    rotated = shown(tmp_path, "rotate", "dashboard", "--keep-s", "0")
    assert [Tokens(run.table).role_of(each["token"]) for each in (created, rotated)] == [None, Role.VIEWER]
    assert "refused from now on" in trireme(tmp_path, "revoke", "dashboard")[1]
    assert Tokens(run.table).role_of(rotated["token"]) is None


def test_a_token_alone_is_printed_so_that_it_can_be_kept(tmp_path: Path, run: TokenFolder) -> None:
    code, output = trireme(tmp_path, "create", "ci", "--role", "member")
    assert code == exit_codes.OK
    assert Tokens(run.table).role_of(output.strip()) is Role.MEMBER


def test_the_cluster_is_meant_unless_a_run_is_named(tmp_path: Path, run: TokenFolder) -> None:
    folder = cluster_folder.place_of(tmp_path)
    TokenFolder(folder).prepare()
    (tmp_path / "b").mkdir()
    assert shown(tmp_path, "list", "--job", "a")["table"] == str(run.table)
    (tmp_path / "a" / run_folder.RUN_FILE).unlink()
    assert shown(tmp_path, "list")["table"] == str(folder / "tokens" / "table.json")


def test_a_table_of_services_that_were_started_by_hand(tmp_path: Path) -> None:
    table = tmp_path / "etc" / "tokens.json"
    created = shown(tmp_path, "create", "ops", "--role", "admin", "--file", str(table))
    assert Tokens(table).role_of(created["token"]) is Role.ADMIN
    assert shown(tmp_path, "revoke", "ops", "--file", str(table))["role"] == "admin"


def test_what_cannot_be_done_is_one_clear_message(tmp_path: Path, run: TokenFolder) -> None:
    before = run.table.read_bytes()
    for arguments, code, words in [
        (("create", "x", "--role", "king"), exit_codes.USAGE, "give one of admin, member, viewer"),
        (("create", "No"), exit_codes.USAGE, "is no name of a token"),
        (("create", "admin"), exit_codes.CONFLICT, "there is a token admin already"),
        (("rotate", "x"), exit_codes.NOT_FOUND, "there is no token x"),
        (("revoke", "member"), exit_codes.CONFLICT, "is what members and commands of this machine use"),
        (("list", "--job", "b"), exit_codes.NOT_FOUND, "holds no run of job b"),
    ]:
        found, output = trireme(tmp_path, *arguments)
        assert (found, words in output) == (code, True), output
    assert run.table.read_bytes() == before

"""`trireme run --host`: members at another address than 127.0.0.1, and the tokens that protect them."""

from __future__ import annotations

import json
import signal
import stat
import time
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.command import Command, wait_for
from tests.end_to_end.scripts import UNHURRIED_LOSS, write_script
from trireme_shared.platform.security.tokens import Role, TokenFolder

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "somewhere.example"])
def test_an_address_that_others_reach_needs_tokens(trireme: Command, tmp_path: Path, host: str) -> None:
    for command in (("run", write_script(tmp_path)), ("up",)):
        done = trireme.run(*command, "--host", host, "--insecure")
        assert done.code == 2, done.err
        assert (
            f"--host = {host} lets other hosts reach all members, and --insecure protects nothing" in done.err
        )


def test_members_are_where_they_are_told_to_be_and_ask_for_a_token(trireme: Command, tmp_path: Path) -> None:
    script = write_script(tmp_path, loss=UNHURRIED_LOSS)
    command = ("run", script, "--trainers", 1, "--pservers", 1, "--epochs", 2000)
    running = trireme.begin(
        *command, "--host", "127.0.0.2", "--advertise", "127.0.0.2", TRIREME_TOKEN="secret"
    )
    with running:
        wait_for(running, r"^job script: master http://127\.0\.0\.2:\d+")
        refused = trireme.run("status", TRIREME_TOKEN="another")
        assert refused.code == 5, refused.err
        # of the folder; the one that was given is an admin's too
        for token in ({}, {"TRIREME_TOKEN": "secret"}):
            shown = json.loads(trireme.run("members", "--json", **token).out)
            assert all(member["url"].startswith("http://127.0.0.2:") for member in shown["members"])
        check_tokens(trireme.folder / ".trireme" / "script", shown["members"])
        running.send_signal(signal.SIGINT)
        assert trireme.end_of(running).code == 130


def check_tokens(folder: Path, members: list[dict[str, str]]) -> None:
    """Every process asks for a token, each role may what it should, and a rotated token counts while all
    run."""
    tokens = TokenFolder(folder)
    assert stat.S_IMODE(tokens.table.parent.stat().st_mode) == 0o700
    for file in tokens.table.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    master = json.loads((folder / "run.json").read_text())["url"]
    pserver = next(member["url"] for member in members if member["kind"] == "pserver")
    given = {role: tokens.token(role) for role in Role}
    expected = {
        (master, "GET", "/v1/job"): (401, 200, 200, 200),
        (master, "GET", "/metrics"): (401, 200, 200, 200),
        (master, "POST", "/v1/task-leases"): (401, 403, 422, 422),
        (master, "POST", "/v1/checkpoints"): (401, 403, 403, 202),
        (pserver, "GET", "/metrics"): (401, 200, 200, 200),
        (pserver, "GET", "/v1/info"): (401, 403, 200, 200),
    }
    with httpx.Client(trust_env=False) as client:

        def status(call: tuple[str, str, str], token: str) -> int:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            return client.request(call[1], call[0] + call[2], headers=headers).status_code

        for call, answers in expected.items():
            shown = ("", given[Role.VIEWER], given[Role.MEMBER], given[Role.ADMIN])
            assert tuple(status(call, token) for token in shown) == answers, call
            assert status(call, "wrong") == 401
        rotated = tokens.rotate(Role.VIEWER, keep_s=0)
        for url in (master, pserver):
            assert status((url, "GET", "/metrics"), rotated) == 200
            deadline = time.monotonic() + 30
            while status((url, "GET", "/metrics"), given[Role.VIEWER]) != 401:
                assert time.monotonic() < deadline, f"{url} takes a token that was rotated"
                time.sleep(0.05)

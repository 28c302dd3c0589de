"""`trireme run --host`: members at another address than 127.0.0.1, and the token that protects them."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.end_to_end.command import Command, wait_for
from tests.end_to_end.scripts import UNHURRIED_LOSS, write_script

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "somewhere.example"])
def test_an_address_that_others_reach_needs_a_token(trireme: Command, tmp_path: Path, host: str) -> None:
    done = trireme.run("run", write_script(tmp_path), "--host", host)
    assert done.code == 2, done.err
    assert f"--host = {host} lets other hosts reach" in done.err
    assert "set TRIREME_TOKEN" in done.err


def test_members_are_where_they_are_told_to_be_and_ask_for_the_token(trireme: Command, tmp_path: Path) -> None:
    script = write_script(tmp_path, loss=UNHURRIED_LOSS)
    command = ("run", script, "--trainers", 1, "--pservers", 1, "--epochs", 2000)
    running = trireme.start(*command, "--host", "127.0.0.2", "--advertise", "127.0.0.2", TRIREME_TOKEN="secret")
    with running:
        wait_for(running, r"^job script: master http://127\.0\.0\.2:\d+")
        refused = trireme.run("status", TRIREME_TOKEN="another")
        assert refused.code == 5, refused.err
        shown = json.loads(trireme.run("members", "--json", TRIREME_TOKEN="secret").out)
        assert all(member["url"].startswith("http://127.0.0.2:") for member in shown["members"])
        running.send_signal(signal.SIGINT)
        assert trireme.end_of(running).code == 130

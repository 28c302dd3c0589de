"""The files of a run's etcd are not as it wrote them."""

from __future__ import annotations

import signal

import pytest

from tests.end_to_end.command import wait_for_step
from tests.end_to_end.scripts import UNHURRIED_LOSS, write_script
from trireme.cli.exit_codes import DAMAGED

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


def test_a_damaged_log_has_an_exit_code_of_its_own_and_the_checkpoints_are_the_way_forward(trireme, tmp_path):
    script = write_script(tmp_path, loss=UNHURRIED_LOSS)
    process = trireme.begin("run", script, "--epochs", 100_000)
    wait_for_step(trireme, 2)
    process.send_signal(signal.SIGTERM)
    assert trireme.end_of(process).code == 130
    (log,) = (tmp_path / ".trireme" / "script" / "etcd").rglob("*.wal")
    content = log.read_bytes()
    assert b"/trireme/" in content
    # within records: etcd takes a length that is too large for a write that was torn, and goes on without it
    log.write_bytes(content.replace(b"/trireme/", b"/trireMe/"))
    done = trireme.run("run", script, "--epochs", 100_000)
    assert (done.code, done.out) == (DAMAGED, ""), done.err
    assert "error: etcd cannot read its files in " in done.err
    assert "`--init-from script`" in done.err
    assert "goroutine" not in done.err
    again = trireme.run(
        "run",
        script,
        "--epochs",
        1,
        "--job",
        "second",
        "--init-from",
        "script",
        "--set",
        "records_per_task=48",
    )
    assert again.code == 0, again.err
    assert "COMPLETED" in again.out

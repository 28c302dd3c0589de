"""Forked processes of tests are what a new interpreter would be, and are found by their mark."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import uuid

import psutil
import pytest

from tests.equipment.forked import MARK, ForkedProcess, clean_environment, warm_server

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="forking servers are Linux's"),
]

SAYS = """
import json, os, sys
from trireme.launch.processes import ForkServer
with ForkServer() as forks:
    forks.prepare()
    kind = type(forks.server).__name__
    print(json.dumps([__name__, sys.argv[1:], os.getcwd(), sys.path[0], os.environ["TRIREME_JOB"], kind]))
print("err", file=sys.stderr)
sys.exit(3)
"""


def test_it_has_its_own_arguments_environment_folder_output_exit_code_and_a_fork_server(tmp_path):
    (tmp_path / "says.py").write_text(SAYS)
    for job in ("a", "b"):
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            environment = clean_environment() | {MARK: uuid.uuid4().hex, "TRIREME_JOB": job}
            forked = warm_server().start(
                "says", ["--x", job], tmp_path, environment, out.fileno(), err.fileno()
            )
            assert forked.wait(60) == 3
            out.seek(0)
            err.seek(0)
            expected = ["__main__", ["--x", job], str(tmp_path), str(tmp_path), job, ForkedProcess.__name__]
            assert (json.loads(out.read()), err.read()) == (expected, b"err\n")


def test_it_is_found_by_its_mark_and_a_signal_is_its_end(tmp_path):
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(60)\n")
    environment = clean_environment() | {MARK: uuid.uuid4().hex}
    with tempfile.TemporaryFile() as out:
        forked = warm_server().start("sleeps", [], tmp_path, environment, out.fileno(), out.fileno())
        process = psutil.Process(forked.pid)
        while process.environ()[MARK] != environment[MARK]:
            assert forked.poll() is None
        forked.kill()
        assert forked.wait(60) == -signal.SIGKILL


def test_variables_that_imports_may_read_need_a_new_interpreter(monkeypatch):
    server = warm_server()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/set/by/an/import")
    ours = clean_environment()
    assert server.imports_as(ours | {"TRIREME_JOB": "a", "ETCD_BIN": "/nowhere", MARK: "m"})
    assert not server.imports_as(ours | {"OMP_NUM_THREADS": "7"})
    assert not server.imports_as({name: value for name, value in ours.items() if name != "PATH"})

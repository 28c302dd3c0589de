"""`backend = "nccl"` on a host without GPU: `trireme run` starts nothing, and the script is described for a
cluster all the same."""

from __future__ import annotations

import pytest

from tests.end_to_end.scripts import write_script
from trireme.cli import exit_codes
from trireme.cli.run import RunRequest, run_command
from trireme.preflight import inspect

NATIVE = {"strategy": "collective", "exchange": "native"}


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return write_script(tmp_path)


@pytest.mark.parametrize("check", [True, False])
def test_trireme_run_refuses_it_before_anything_starts(script, tmp_path, capsys, check):
    flags = {
        **NATIVE,
        "backend": "nccl",
        "data_dir": str(tmp_path / "runs"),
        "global_batch_size": 8,
        "epochs": 1,
    }
    assert run_command(RunRequest(script, flags, check=check)) == exit_codes.USAGE
    told = capsys.readouterr().err
    assert "--backend is nccl, but this host, where the trainers run, has no GPU" in told
    assert "use backend gloo, or auto" in told
    assert not (tmp_path / "runs").exists()


async def test_the_script_of_a_job_for_other_hosts_is_described(script):
    settings = {**NATIVE, "global_batch_size": 8}
    assert (await inspect(script, {**settings, "backend": "nccl"})).nccl is False
    assert (await inspect(script, {**settings, "backend": "auto"})).nccl is None

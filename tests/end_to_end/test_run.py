"""`trireme run` end to end: real etcd, master, parameter servers and trainers; a model that plain PyTorch
loads."""

from __future__ import annotations

import json
import re
import signal
import time

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.command import wait_for
from tests.end_to_end.scripts import EVALUATION, HEAD, OPTIMIZER, RECORDS, UNHURRIED_LOSS, write_script
from tests.equipment.command_lines import command_line
from trireme.launch.run_folder import SOCKETS, sockets
from trireme_shared.platform.etcd.embedded import sweep_sockets

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


ONE_CYCLE = """
def scheduler(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=trireme.total_steps())
"""


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_model_trains_and_plain_pytorch_loads_it(trireme, tmp_path, mode):
    printing = EVALUATION.replace("    return {", "    print('evaluating', len(batch['y']))\n    return {", 1)
    script = write_script(tmp_path, evaluation=printing, optimizer=OPTIMIZER + ONE_CYCLE)
    done = trireme.run("run", script, "--mode", mode, "--trainers", 2, "--pservers", 2, "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert (result["phase"], result["mode"], result["records"]) == ("COMPLETED", mode, 2 * RECORDS)
    assert mode == "async" or result["steps"] == 2 * RECORDS // 32
    assert json.loads(trireme.run("status", "--json").out) == result
    assert "trainer-0 │ evaluating " in done.err or "trainer-1 │ evaluating " in done.err
    if mode == "sync":  # the members have ended; what they logged and the script printed is there
        lines = [
            json.loads(line)
            for line in trireme.run("logs", "trainer", "--tail", 5000, "--json").out.splitlines()
        ]
        assert {line["member"] for line in lines} == {"trainer-0", "trainer-1"}
        assert sum(line["text"].startswith("evaluating ") for line in lines) >= RECORDS // 64
        assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    assert result["discarded"] == {"tasks": 0, "records": 0, "list": []}
    assert 0 < result["metrics"]["mse"] < 1
    assert (result["restarts"], result["failure"]) == ({}, None)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
    )
    values = torch.load(result["exports"]["state_dict"], weights_only=True)
    model.load_state_dict(values)
    assert all(
        torch.equal(values[name], value)
        for name, value in load_file(result["exports"]["safetensors"]).items()
    )


ROWS = """
import numpy as np

class rows:
    @staticmethod
    def count(url):
        return 64

    @staticmethod
    def read(url, first, count):
        for number in range(first, first + count):
            yield {"x": np.full(8, number / 64, np.float32), "y": np.float32(number / 64)}
"""


def test_custom_readers_beside_the_script_and_in_it(trireme, tmp_path):
    (tmp_path / "own_rows.py").write_text(ROWS)
    dataset = "def dataset():\n    return trireme.data.Custom('rows', reader='own_rows:rows')\n"
    script = write_script(
        tmp_path,
        head=HEAD + ROWS,
        dataset=dataset,
        evaluation=EVALUATION.replace(
            "return dataset()", "return trireme.data.Custom('rows', reader='script:rows')"
        ),
    )
    done = trireme.run("run", script, "--trainers", 1, "--pservers", 1, "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert (result["phase"], result["records"], "mse" in result["metrics"]) == ("COMPLETED", 2 * 64, True)


def test_progress_goes_to_stderr_and_the_summary_to_stdout(trireme, tmp_path):
    script = write_script(tmp_path, loss=UNHURRIED_LOSS, evaluation=EVALUATION)
    done = trireme.run("run", script, "--trainers", 1, "--job", "mine", "--epochs", 6)  # a line every 5 s
    assert done.code == 0, done.err
    assert re.search(r"^RUNNING  epoch \d+/6  step \d+  loss [\d.]+ ", done.err, re.MULTILINE)
    assert "trainers 1/1  pservers 1/1" in done.err
    facts = dict(line.split("  ", 1) for line in done.out.splitlines())
    assert facts["job"].strip().startswith("mine COMPLETED after")
    assert facts["model (safetensors)"].strip() == str(
        tmp_path / ".trireme" / "mine" / "export" / "model.safetensors"
    )
    assert "mse" in facts
    assert "\x1b" not in done.out + done.err


def test_the_first_ctrl_c_stops_all_children_in_order(trireme, tmp_path):
    process = trireme.start("run", write_script(tmp_path, loss=UNHURRIED_LOSS), "--epochs", 100_000)
    wait_for(process, "RUNNING")
    before = time.monotonic()
    process.send_signal(signal.SIGINT)
    done = trireme.end_of(process)
    assert done.code == 130
    assert time.monotonic() - before < 20
    assert "Traceback" not in done.err
    logs = tmp_path / ".trireme" / "script" / "logs"
    for name in ("trainer-0", "pserver-0", "master-0"):
        assert '"signal": "SIGTERM"' in (logs / f"{name}.log").read_text()


def test_the_second_ctrl_c_kills(trireme, tmp_path):
    process = trireme.start(
        "run", write_script(tmp_path, loss=UNHURRIED_LOSS), "--epochs", 100_000, "--trainers", 1
    )
    wait_for(process, "RUNNING")
    trainer = next(child for child in trireme.family() if "trainer_agent" in command_line(child))
    trainer.suspend()  # it will not stop by itself
    process.send_signal(signal.SIGINT)
    wait_for(process, "interrupt again to stop at once")
    process.send_signal(signal.SIGINT)
    assert trireme.end_of(process).code == 130


def test_ctrl_c_before_anything_is_started_leaves_nothing(trireme, tmp_path):
    process = trireme.start("run", write_script(tmp_path, head="import time\ntime.sleep(60)\n"))
    while len(trireme.family()) < 2:  # the launcher, and the child that imports the script
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    done = trireme.end_of(process)
    assert (done.code, done.out) == (130, "")
    assert "Traceback" not in done.err


@pytest.mark.skipif(not psutil.LINUX, reason="PDEATHSIG is Linux's")
def test_no_child_outlives_a_launcher_that_is_killed_and_the_next_run_removes_its_sockets(trireme, tmp_path):
    process = trireme.start("run", write_script(tmp_path, loss=UNHURRIED_LOSS), "--epochs", 100_000)
    wait_for(process, "RUNNING")
    assert len(trireme.family()) >= 5  # launcher, etcd's environment is its own: master, pserver, trainers
    etcd = next(child for child in psutil.Process(process.pid).children() if "etcd" in child.name())
    links = [path for path in tmp_path.rglob(SOCKETS) if path.is_symlink()]
    left = [link.readlink() for link in links]
    assert len(left) == 2, "of the run, and of its etcd"
    assert all(list(folder.iterdir()) for folder in left)
    process.kill()
    trireme.end_of(process)
    psutil.wait_procs([etcd, *trireme.family()], timeout=5)
    assert not etcd.is_running()
    sweep_sockets()  # as the next run does, of this job or of another one
    with sockets(tmp_path):
        assert not [folder for folder in left if folder.exists()]


def test_status_tasks_and_members_ask_the_running_job(trireme, tmp_path):
    process = trireme.begin("run", write_script(tmp_path, loss=UNHURRIED_LOSS), "--epochs", 100_000)
    try:
        wait_for(process, "RUNNING")
        status = json.loads(trireme.run("status", "--json").out)
        assert (status["job"], status["phase"]) == ("script", "RUNNING")
        members = json.loads(trireme.run("members", "--job", "script", "--json").out)["members"]
        assert {member["kind"] for member in members} == {"pserver", "trainer"}
        tasks = json.loads(trireme.run("tasks", "--json").out)
        assert tasks["summary"]["total"] == RECORDS // 16
        again = trireme.run("run", tmp_path / "script.py")
        assert (again.code, again.out) == (2, "")
        assert f"job script is already running in {tmp_path}" in again.err
    finally:
        process.send_signal(signal.SIGTERM)
        trireme.end_of(process)
    gone = trireme.run("status")
    assert gone.code == 0
    assert "was stopped before its end" in gone.out
    assert "resumes it" in gone.out


def test_a_job_that_was_never_started_is_not_found(trireme):
    done = trireme.run("status", "--job", "nothing")
    assert (done.code, done.out) == (3, "")
    assert "holds no run of job nothing" in done.err


def test_a_dry_run_prints_the_spec_and_starts_nothing(trireme, tmp_path):
    script = write_script(tmp_path)
    (tmp_path / "trireme.toml").write_text("epochs = 7\npservers = 3\n")
    done = trireme.run("run", script, "--no-check", "--dry-run", "--pservers", 2, TRIREME_SEED="11")
    assert done.code == 0, done.err
    spec = json.loads(done.out)
    assert [spec[name] for name in ("job", "epochs", "pservers", "seed", "lanes")] == ["script", 7, 2, 11, 4]
    assert not (tmp_path / ".trireme").exists()

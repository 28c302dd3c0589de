"""What users get wrong: one clear message each, no stack trace for what is no bug, no child left, the right
exit code.

What the inspection of a script finds wrong in it: tests/trainer_agent/script/test_inspect.py; here one of
each kind."""

from __future__ import annotations

import json
import os
import socket
import time

import pytest

from tests.end_to_end.scripts import HEAD, LOSS, write_script

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


FAILS_IN_TRAINERS = LOSS.replace(
    "    return", "    if 'TRIREME_NAME' in os.environ: raise RuntimeError('boom')\n    return"
)


def one_message(done, code, *parts):
    """Exit code, nothing on stdout, and after the first line a short message that has all parts and no stack
    trace."""
    assert done.code == code, done.err
    assert done.out == ""
    for part in parts:
        assert part in done.err
    assert "Traceback" not in done.err
    assert len(said(done).strip().splitlines()) <= 2
    assert done.err.count("error: ") == 1


def said(done) -> str:
    """What follows the line `checking SCRIPT`."""
    first, _, rest = done.err.partition("\n")
    return rest if first.startswith("checking ") else done.err


def test_a_missing_script(trireme):
    one_message(trireme.run("run", "nope.py"), 2, "nope.py does not exist", "give the path of a Python file")


def test_a_folder_instead_of_a_script(trireme, tmp_path):
    one_message(trireme.run("run", tmp_path), 2, "is a directory")


def test_a_module_without_model(trireme, tmp_path):
    script = write_script(tmp_path, model="")
    one_message(trireme.run("run", script), 2, f"{script} has no function 'model'", "def model()")


def test_a_setting_of_the_script_that_does_not_go_with_a_flag(trireme, tmp_path):
    script = write_script(tmp_path, config="config = trireme.Config(min_members=2)\n")
    told = (
        "min_members is 2, which only jobs with strategy collective can have; leave it out, or use "
        "that strategy"
    )
    given = ("--strategy", "parameter_server")
    one_message(trireme.run("run", script, *given), 2, f"error: {told} (from config min_members, --strategy)")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lanes", 6], "lanes must be a power of two, got 6; use 4 or 8 (from --lanes)"),
        (["--epochs", "0"], "--epochs = 0: input should be greater than or equal to 1"),
        (["--mode", "fast"], "--mode = 'fast': input should be 'sync' or 'async'"),
        (["--port", 70_000], "--port = 70000: give a whole number from 0 to 65535"),
        (["--job", "???"], "--job = '???': a job's name has lower-case letters, digits and hyphens"),
        (["--set", "colour=blue"], "no setting 'colour'"),
        (
            ["--set", "keep_checkpoints=x"],
            "error: --set keep_checkpoints = 'x': input should be a valid integer",
        ),
        (
            ["--trainers", 2, "--min-members", 2],
            (
                "error: min_members is 2, which only jobs with strategy collective can have; leave it "
                "out, or use that strategy (from --min-members)"
            ),
        ),
        (["--global-batch-size", 30], "global_batch_size 30 is not a multiple of lanes 4"),
    ],
)
def test_settings_that_cannot_be(trireme, tmp_path, flags, message):
    one_message(trireme.run("run", write_script(tmp_path), *flags), 2, message)


@pytest.mark.parametrize("where", ["flag", "script's name", "config"])
def test_a_name_that_etcd_keys_cannot_have_is_changed_and_the_change_is_told(trireme, tmp_path, where):
    config = 'config = trireme.Config(job="my_job")\n' if where == "config" else ""
    script = write_script(tmp_path, config=config).rename(tmp_path / "my_job.py")
    done = trireme.run(
        "run", script, "--no-check", "--dry-run", *(["--job", "my_job"] if where == "flag" else [])
    )
    assert (done.code, json.loads(done.out)["job"]) == (0, "my-job")
    origin = {"flag": "--job", "script's name": "the script's name", "config": "config job"}[where]
    expected = (
        f"the job is called my-job, not my_job ({origin}): a job's name has lower-case letters, digits "
        "and hyphens\n"
    )
    assert said(done) == expected
    missing = trireme.run("status", "--job", "my_job")
    assert missing.err.startswith("error: .trireme holds no run of job my-job")


def test_a_port_in_use(trireme, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        one_message(
            trireme.run("run", write_script(tmp_path), "--port", port), 2, f"port {port}", "is not free"
        )


def test_a_data_directory_that_cannot_be_written(trireme, tmp_path):
    script = write_script(tmp_path)
    one_message(trireme.run("run", script, "--data-dir", script), 2, "cannot be written", "--data-dir")


def test_an_etcd_that_is_none(trireme, tmp_path):
    script = write_script(tmp_path)
    one_message(
        trireme.run("run", script, "--no-check", ETCD_BIN=str(script)),
        2,
        "ETCD_BIN",
        "not an executable file",
    )


def the_users_traceback(done, *parts):
    assert (done.code, done.out) == (1, "")
    assert done.err.count("Traceback (most recent call last)") == 1
    assert said(done).startswith("Traceback")
    for part in parts:
        assert part in done.err
    assert "trainer_agent" not in done.err


def test_a_script_that_does_not_import(trireme, tmp_path):
    script = write_script(tmp_path, head=HEAD + "import nonexistent_thing\n")
    the_users_traceback(trireme.run("run", script), "script.py", "No module named 'nonexistent_thing'")


def test_a_script_that_is_no_python(trireme, tmp_path):
    done = trireme.run("run", write_script(tmp_path, model="def model(:\n"))
    assert (done.code, done.out) == (1, "")
    assert "SyntaxError: invalid syntax" in done.err
    assert "trainer_agent" not in done.err


def test_a_model_that_fails_in_forward(trireme, tmp_path):
    script = write_script(tmp_path, loss="def loss(model, batch):\n    return model(batch['z'])\n")
    the_users_traceback(trireme.run("run", script), "in loss", "KeyError: 'z'", "in the first minibatch")


def test_a_model_that_fails_only_in_training_tells_its_task(trireme, tmp_path):
    script = write_script(tmp_path, head="import os\n" + HEAD, loss=FAILS_IN_TRAINERS)
    done = trireme.run("run", script, "--json")
    assert done.code == 1
    assert done.err.count("Traceback (most recent call last)") == 1
    assert "RuntimeError: boom\nin task " in done.err
    assert "job failed: RuntimeError twice before a step was known to be done: boom" in done.err
    assert "trainer_agent" not in done.err
    result = json.loads(done.out)
    assert (result["phase"], result["failure"]["error_type"]) == ("FAILED", "RuntimeError")


def test_a_member_that_cannot_start_ends_the_job_with_its_own_words(trireme, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "fastapi.py").write_text("raise ImportError('fastapi is broken here')\n")
    path = os.pathsep.join([str(broken), os.environ.get("PYTHONPATH", "")])
    began = time.monotonic()
    done = trireme.run("run", write_script(tmp_path), "--no-check", PYTHONPATH=path)
    assert (done.code, done.out) == (1, "")
    assert (
        "error: master-0 ended 2 times before it was ready, the last time with exit code 1; its log is"
        in done.err
    )
    assert done.err.strip().endswith("ImportError: fastapi is broken here")
    assert (done.err.count("it is started again"), done.err.count("it is not started again")) == (1, 1)
    assert time.monotonic() - began < 45


def test_a_script_that_ends_its_process(trireme, tmp_path):
    done = trireme.run("run", write_script(tmp_path, model="import os\nos._exit(7)\n"))
    assert (done.code, done.out) == (1, "")
    assert "ended the process that imports it (exit code 7)" in done.err

"""`trireme up` and the commands that talk to it, as a user types them: jobs share a cluster, survive its
deaths, and keep their bits."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from tests.end_to_end.cluster_command import LIMIT_S, answered, good, is_at, job_when, model_of, script_in, up
from tests.end_to_end.command import Command, Done
from tests.end_to_end.local_cluster import EPOCHS, STEPS, same_bits
from tests.equipment.command_lines import command_line
from tests.equipment.forked import ForkedProcess
from trireme.cli import exit_codes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]
SLOW_S = 0.25  # seconds of a minibatch: a job lasts a minute


def child_of(process: ForkedProcess, module: str) -> psutil.Process:
    found = [child for child in psutil.Process(process.pid).children() if module in command_line(child)]
    assert len(found) == 1, found
    return found[0]


def error_of(done: Done) -> str:
    """Its first line; a line before it may say that the command waited for a master to lead."""
    return next((line for line in done.err.splitlines() if line.startswith("error: ")), done.err)


def until_answered(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_two_jobs_share_a_cluster_whose_leader_and_host_die_and_the_bits_are_those_of_a_job_alone(
    trireme: Command, undisturbed: dict[str, torch.Tensor]
) -> None:
    script = script_in(trireme.folder, SLOW_S)
    with up(trireme, "--trainers", 2, "--pservers", 2, "--standbys", 1) as process:
        tasks = {
            "a": ("--pre-task", "echo ready for $TRIREME_JOB", "--post-task", "echo $TRIREME_STANDING"),
            "b": (),
        }
        submitted = [
            good(answered(trireme, "submit", script, "--name", name, "--epochs", EPOCHS, *more, "--json"))
            for name, more in tasks.items()
        ]
        assert [job["job"] for job in submitted] == ["a", "b"]
        script.unlink()  # it was sent
        for name in ("a", "b"):
            job_when(trireme, name, is_at(2))
        pool = good(answered(trireme, "pool", "--json"))["members"]
        assert sorted((place["job"], place["kind"]) for place in pool) == [
            *[("a", "pserver"), ("a", "trainer")],
            *[("b", "pserver"), ("b", "trainer")],
        ]
        assert answered(trireme, "delete", "b").code == exit_codes.CONFLICT
        explained = answered(trireme, "explain", "a")
        assert (explained.code, explained.out.startswith("job a: ")) == (0, True), explained
        cancelled = answered(trireme, "cancel", "b")
        assert (cancelled.code, "CANCELLED" in cancelled.out) == (0, True), cancelled
        child_of(process, "trireme.host").kill()
        seen = job_when(trireme, "a", is_at(2))
        leader = job_when(trireme, "a", is_at(seen["progress"]["step"] + 2))["master"][
            "master_id"
        ].rpartition("-")[0]
        child_of(process, f"master_service [{leader}]").kill()
        (trireme.folder / "slow").unlink()
        job = job_when(trireme, "a", lambda job: job["standing"] == "COMPLETED")
        assert same_bits(model_of(job), undisturbed)
        until_answered(
            lambda: good(answered(trireme, "job-tasks", "a", "post-0", "--json"))["state"] == "SUCCEEDED"
        )
        before, after = good(answered(trireme, "job-tasks", "a", "--json"))["job_tasks"]
        assert (before["state"], before["attempt"], after["state"]) == ("SUCCEEDED", 1, "SUCCEEDED")
        assert [answered(trireme, "job-tasks", "a", name).out for name in ("pre-0", "post-0")] == [
            "ready for a\n",
            "COMPLETED\n",
        ]
        assert answered(trireme, "job-tasks", "a", "pre-7").code == exit_codes.NOT_FOUND
        states = {job["job"]: job["standing"] for job in good(answered(trireme, "jobs", "--json"))["jobs"]}
        assert states == {"a": "COMPLETED", "b": "CANCELLED"}
        assert (
            good(answered(trireme, "checkpoint", "list", "--job", "a", "--json"))["checkpoints"][0]["step"]
            == STEPS
        )
        exported = good(
            answered(trireme, "export", "--job", "a", "--out", trireme.folder / "model", "--json")
        )["exports"]
        assert same_bits(torch.load(exported["state_dict"], weights_only=True), undisturbed)
        killing = answered(trireme, "chaos", "kill", "trainer-0", "--job", "a")
        assert (killing.code, "trireme pool" in killing.err) == (exit_codes.CONFLICT, True), killing
        files = trireme.folder / ".trireme" / "_cluster" / "jobs" / "a"
        files.rename(files.with_name("elsewhere"))
        lacking = answered(trireme, "checkpoint", "list", "--job", "a")
        assert (lacking.code, f"has no folder {files}" in lacking.err) == (exit_codes.NOT_FOUND, True), (
            lacking
        )
        listed = answered(trireme, "jobs", "--state", "cancelled")
        assert (listed.code, listed.out.splitlines()[1].split()[:2]) == (0, ["b", "cancelled"])
        assert answered(trireme, "delete", "b").code == 0
        gone = answered(trireme, "status", "b")
        assert (gone.code, "there is no job b in this cluster" in gone.err) == (exit_codes.NOT_FOUND, True), (
            gone
        )
        assert not (trireme.folder / ".trireme" / "_cluster" / "jobs" / "b").exists()


def test_a_cluster_that_was_ended_goes_on_with_its_jobs_and_is_found_from_elsewhere(
    trireme: Command, undisturbed: dict[str, torch.Tensor]
) -> None:
    script = script_in(trireme.folder, SLOW_S)
    with up(trireme, "--trainers", 1) as process:
        good(answered(trireme, "submit", script, "--name", "a", "--epochs", EPOCHS, "--no-check", "--json"))
        job_when(trireme, "a", is_at(2))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert "unfinished: a; the same `trireme up` goes on with them" in (trireme.folder / "up.log").read_text()
    facts = good(trireme.run("up", "--detach", "--trainers", 2, "--json"))
    try:
        elsewhere = trireme.folder / "elsewhere"
        elsewhere.mkdir()
        token = Path(facts["folder"]) / "tokens" / "admin"
        assert token.stat().st_mode & 0o077 == 0
        there = {
            "TRIREME_URL": facts["url"],
            "TRIREME_TOKEN_FILE": str(token),
            "TRIREME_DATA_DIR": str(elsewhere),
        }
        seen = answered(trireme, "status", "a", "--json", **there)
        assert seen.code == 0, seen
        assert (
            answered(trireme, "status", "a", **(there | {"TRIREME_TOKEN_FILE": ""})).code == exit_codes.AUTH
        )
        reading = there | {"TRIREME_TOKEN_FILE": str(token.with_name("viewer"))}
        logged = answered(trireme, "logs", "--job", "a", "--tail", 100_000, "--json", **reading)
        assert logged.code == 0, logged
        lines = [json.loads(line) for line in logged.out.splitlines()]
        assert {line["member"].split("-")[-3] for line in lines} == {"trainer", "pserver"}, logged.out[-2000:]
        assert answered(trireme, "logs", "nobody", "--job", "a", **reading).code == exit_codes.NOT_FOUND
        assert trireme.run("up", "--trainers", 1).code == exit_codes.USAGE
        (trireme.folder / "slow").unlink()
        job = job_when(trireme, "a", lambda job: job["standing"] == "COMPLETED")
        assert same_bits(model_of(job), undisturbed)
    finally:
        assert trireme.run("down").code == 0


def test_what_cannot_be_done_is_one_clear_message(trireme: Command) -> None:
    script = script_in(trireme.folder)
    none = answered(trireme, "submit", script)
    assert (none.code, "no cluster runs in" in none.err, "Traceback" in none.err) == (
        exit_codes.NOT_FOUND,
        True,
        False,
    )
    assert trireme.run("down").code == exit_codes.NOT_FOUND
    assert trireme.run("up", "--trainers", 0, "--pservers", 0).code == exit_codes.USAGE
    with up(trireme, "--trainers", 1):
        for command, name in (("pause", "../etc"), ("resume", "a/b"), ("cancel", ".."), ("delete", "A")):
            unknown = answered(trireme, command, "nobody")
            assert (unknown.code, error_of(unknown)) == (
                exit_codes.NOT_FOUND,
                "error: there is no job nobody in this cluster",
            )
            wrong = answered(trireme, command, name)
            assert (wrong.code, error_of(wrong)) == (
                exit_codes.USAGE,
                f"error: {name!r} is no name of a job",
            )
        missing = answered(trireme, "submit", "nothing.py")
        assert (missing.code, "nothing.py does not exist" in missing.err) == (exit_codes.USAGE, True)
        for arguments, told in (
            (("--min-trainers", "3", "--max-trainers", "2"), "max_trainers 2 is less than min_trainers 3"),
            (("--priority", "101"), "--priority = 101"),
            (("--not-before", "soon"), "--not-before = 'soon'"),
            (("--after", "nobody"), "nobody"),
        ):
            refused = answered(trireme, "submit", script, "--no-check", *arguments)
            assert (refused.code in (exit_codes.USAGE, exit_codes.NOT_FOUND), told in refused.err) == (
                True,
                True,
            ), refused
        assert good(answered(trireme, "jobs", "--json")) == {"jobs": []}
        failing = trireme.folder / "mine" / "failing.py"
        failing.write_text(
            script.read_text().replace("def optimizer(model):", "def optimizer(model):\n    1 / 0")
        )
        ended = answered(trireme, "submit", failing, "--name", "f", "--no-check", "--wait")
        assert (ended.code, "ZeroDivisionError: division by zero" in ended.err) == (
            exit_codes.JOB_FAILED,
            True,
        ), ended


@pytest.mark.soak  # for its length
def test_a_job_that_needs_more_members_than_there_are_gets_them_within_the_limits(trireme: Command) -> None:
    script = script_in(trireme.folder)
    places = ("--trainers", 1, "--pservers", 1, "--max-trainers", 3, "--max-pservers", 2)
    with up(trireme, *places):
        submit = ("submit", script, "--no-check", "--json", "--epochs", EPOCHS, "--min-trainers")
        good(answered(trireme, *submit, 2, "--name", "a", "--pservers", 1))
        good(answered(trireme, *submit, 1, "--name", "b", "--pservers", 1))
        good(answered(trireme, *submit, 1, "--name", "c", "--pservers", 1))
        for name in ("a", "b"):
            job_when(trireme, name, is_at(2))
        pool = good(answered(trireme, "pool", "--json"))["members"]
        assert sorted((place["job"], place["kind"]) for place in pool) == [
            *[("a", "pserver"), ("a", "trainer"), ("a", "trainer")],
            *[("b", "pserver"), ("b", "trainer")],
        ]
        said = (trireme.folder / "up.log").read_text()
        assert "trainers: " in said, said
        assert "more, because jobs need" in said, said
        (trireme.folder / "slow").unlink()
        job_when(trireme, "c", lambda job: job["standing"] == "COMPLETED")


def test_launchers_refuse_what_does_not_go_together(trireme: Command) -> None:
    for arguments, told in (
        (("--launcher", "docker"), "--launcher docker: give one of local, ray, none"),
        (("--trainers", 3, "--max-trainers", 2), "--max-trainers 2 is less than --trainers 3"),
        (("--launcher", "none", "--trainers", 1), "--launcher none starts no places"),
        (("--trainer-resources", "GPU=1"), "--trainer-resources: only for --launcher ray"),
        (("--launcher", "ray"), "--launcher ray needs --storage"),
    ):
        refused = trireme.run("up", *arguments)
        assert (refused.code, told in refused.err) == (exit_codes.USAGE, True), refused

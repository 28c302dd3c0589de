"""Jobs of a compose project: submitted, watched, and what is looked at once they have ended."""

from __future__ import annotations

import hashlib
import sys
import time

from tests.compose.project import (
    DIGITS,
    Project,
    check_no_secret_shows,
    check_nothing_published,
    check_restrictions,
    names,
    until,
)
from tests.soak.run import SoakError
from trireme.client import Client, Standing

EXAMPLE = "digits"
LEAST_ACCURACY = 0.95
JOB_S = 2400
NEXT_STEP_S = 300
KEPT_STEPS = 100  # between two disturbances


class Timeline:
    def __init__(self) -> None:
        self._begun = time.monotonic()

    def say(self, text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - self._begun:7.1f} s  {text}\n")
        sys.stdout.flush()


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SoakError(otherwise)


def looked_at(project: Project, timeline: Timeline) -> None:
    check_nothing_published(project)
    check_restrictions(project)
    count = check_no_secret_shows(project, project.environment["TRIREME_IMAGE"])
    check(count >= 7, f"{count} secrets were found on the volumes")
    timeline.say(f"published at 127.0.0.1 alone; nobody is root; none of {count} secrets shows")


def submit(project: Project, job: str, epochs: int) -> None:
    project.cli(
        "submit", DIGITS, "--name", job, "--epochs", str(epochs), "--max-trainers", "2", "--pservers", "1"
    )


def check_ended(project: Project, client: Client, job: str, timeline: Timeline) -> str:
    """Its model's SHA-256."""
    ended = until(f"the end of {job}", lambda: _ended(client, job), JOB_S, every_s=0.5)
    check(ended.standing == Standing.COMPLETED, f"{job} is {ended.standing}: {ended.reason}")
    assert ended.result is not None
    accuracy = ended.result.metrics["accuracy"]
    check(accuracy >= LEAST_ACCURACY, f"the accuracy of {job} is {accuracy}")
    model = hashlib.sha256(project.cat(f"{project.storage}/{job}/export/model.safetensors")).hexdigest()
    timeline.say(
        f"{job} is COMPLETED: accuracy {accuracy:.4f}, step {ended.progress.step}, model {model[:16]}"
    )
    return model


def _ended(client: Client, job: str):
    found = client.get_job(job)
    return found if found.standing in (Standing.COMPLETED, Standing.FAILED, Standing.CANCELLED) else None


def trains(client: Client, since: int, job: str, steps: int = KEPT_STEPS) -> None:
    def far_enough() -> bool:
        found = client.get_job(job)
        check(
            found.standing in (Standing.QUEUED, Standing.ACTIVE),
            f"the job ended too early, {found.standing}: --epochs",
        )
        return (found.progress.step or 0) > since + steps

    until("steps of the job", far_enough, NEXT_STEP_S)


def working(project: Project, client: Client, service: str, job: str) -> str:
    """A container that runs a member of the job."""
    found = project.containers(service)
    if service == "etcd":
        return names(found)[0]
    if service == "master":
        leader = client.get_job(job).master.master_id
        return names([each for each in found if each["Config"]["Hostname"] in leader])[0]
    members = {member.agent for member in client.list_pool_members() if member.job == job}
    busy = [each for each in found if each["Config"]["Hostname"] in members]
    check(bool(busy), f"no container of {service} works for the job: {members}")
    return names(busy)[0]

"""The project with docker/s3.env: checkpoints and models lie in a bucket, a job goes on from there, and gives
the same bits."""

from __future__ import annotations

import time

from tests.compose import s3_server
from tests.compose.jobs import (
    EXAMPLE,
    NEXT_STEP_S,
    Timeline,
    check,
    check_ended,
    looked_at,
    submit,
    trains,
    working,
)
from tests.compose.project import Project, until
from trireme.client import Client

JOB = "stored"
BUCKET = "s3://trireme/jobs"


def scenario(project: Project, epochs: int, calm: str, timeline: Timeline) -> None:
    """`calm`: the digest of the model that as many epochs gave with the storage on a volume; "": it is not
    known."""
    timeline.say(f"S3 server: {project.environment['S3_IMAGE']}")
    begun = time.monotonic()
    project.up()
    timeline.say(
        f"docker compose --env-file {s3_server.ENV_FILE} up -d took {time.monotonic() - begun:.1f} s"
    )
    with project.client() as client:
        check_ended(project, client, EXAMPLE, timeline)
        submit(project, JOB, epochs)
        restored(project, client, timeline)
        bits = check_ended(project, client, JOB, timeline)
        check(bits == calm or not calm, f"the models differ: {bits} is not {calm}")
    if calm:
        timeline.say("the model in the bucket has the bits of the one on the volume")
    looked_at(project, timeline)
    check("jobs" not in project.cli("ls", "/storage").split(), "there are files of jobs on the volume")
    listed = project.cli("checkpoint", "verify", "--job", JOB)
    timeline.say(f"checkpoint verify: {' '.join(listed.split())[:200]}")
    project.cli("export", "--job", JOB)
    check(
        any(name.startswith("export-step-") for name in project.cli("ls", f"{BUCKET}/{JOB}").split()),
        "`export` has written nothing",
    )


def restored(project: Project, client: Client, timeline: Timeline) -> None:
    """A parameter server is killed once there is a checkpoint; another one loads that from the bucket."""
    until("a checkpoint in the bucket", lambda: checkpoints(project, client), NEXT_STEP_S, every_s=0.5)
    trains(client, 0, JOB)
    name = working(project, client, "pserver", JOB)
    furthest, begun = client.get_job(JOB).progress.step or 0, time.monotonic()
    seen = client.list_events(JOB, page_size=1).newest
    project.kill(name)
    receipt = until("the receipt of the kill", lambda: rolled_back(client, seen), NEXT_STEP_S)
    until("a later step", lambda: (client.get_job(JOB).progress.step or 0) > furthest, NEXT_STEP_S)
    took = time.monotonic() - begun
    check(receipt in project.cli("events", JOB), f"`trireme events` does not show: {receipt}")
    project.up()
    timeline.say(f"killed {name} at step {furthest}: {receipt}; {took:.1f} s until a later step was seen")


def rolled_back(client: Client, after: int) -> str:
    """What the job says once it has gone back to its checkpoint."""
    return next(
        (
            event.message
            for event in client.list_events(JOB, after=after).events
            if event.name == "rolled_back"
        ),
        "",
    )


def checkpoints(project: Project, client: Client) -> list[str]:
    """Those in the bucket, once the master knows of one. Older ones are removed all the time, so they are not
    compared."""
    known = any(client.list_checkpoints(JOB))
    return project.cli("ls", f"{BUCKET}/{JOB}/checkpoints").split() if known else []

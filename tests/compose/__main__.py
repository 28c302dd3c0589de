"""`make compose-test`: the image is built, `docker compose up` trains, is scaled through REST and loses containers; the model's bits are
those of an undisturbed run, and nothing is left. Needs a Docker Engine (DOCKER_HOST, as for docker).

BASE_IMAGE, BUILD_IMAGE: as in docs/docker.md; without them Docker Hub's Python, else a Debian that debootstrap makes.
"""

from __future__ import annotations

import argparse
import sys
import time

from shared.runtime import ids, telemetry
from tests.compose import engine
from tests.compose.project import (
    DIGITS,
    Project,
    check_no_secret_shows,
    check_nothing_published,
    check_restrictions,
    names,
    step_of,
    until,
)
from tests.compose.restoring import restoring_is_seen
from tests.soak.run import SoakError
from trireme.client import Client, Standing

IMAGE, ETCD_IMAGE = "trireme-test:latest", "trireme-test-etcd:latest"
MOST_MB = 1200
LEAST_ACCURACY = 0.95
JOB_S = 1200
NEXT_STEP_S = 120
DIGEST = "import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], 'rb').read()).hexdigest())"
KEPT_STEPS = 100  # between two disturbances


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compose", description=__doc__)
    parser.add_argument("--epochs", type=int, default=150, help="of each of the two jobs (default: 150, 23 steps each)")
    parser.add_argument("--port", type=int, default=8479, help="where the API is published (default: 8479)")
    parser.add_argument("--no-build", action="store_true", help=f"take {IMAGE} and {ETCD_IMAGE} as they are")
    parser.add_argument("--keep", action="store_true", help="leave the containers running")
    arguments = parser.parse_args()
    telemetry.configure(level="ERROR", json=False)
    if why := engine.missing():
        sys.stderr.write(f"no Docker Engine to test with: {why}\n")
        return 2
    environment = {
        "TRIREME_IMAGE": IMAGE,
        "ETCD_IMAGE": ETCD_IMAGE,
        "API_PORT": str(arguments.port),
        "TRAINERS": "4",
        "PSERVERS": "3",
        "MASTERS": "2",
        "EXAMPLE": "digits",
    }
    project = Project(f"trireme-test-{ids.secret()[:8]}".lower(), environment)
    timeline = Timeline()
    timeline.say(f"{engine.machine()}; project {project.name}")
    try:
        scenario(project, arguments, timeline)
    except SoakError as error:
        timeline.say(f"FAILED: {error}")
        for service in ("master", "pserver", "trainer", "etcd"):
            timeline.say(project.compose("logs", "--tail", "15", service)[-4000:])
        return 1
    finally:
        if not arguments.keep:
            timeline.say("docker compose down --volumes")
            project.down()
    if not arguments.keep:
        if left := project.remains():
            timeline.say(f"FAILED: these are left: {', '.join(left)}")
            return 1
        timeline.say("no container, volume or network is left")
    timeline.say("passed")
    return 0


class Timeline:
    def __init__(self) -> None:
        self._begun = time.monotonic()

    def say(self, text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - self._begun:7.1f} s  {text}\n")
        sys.stdout.flush()


def scenario(project: Project, arguments: argparse.Namespace, timeline: Timeline) -> None:
    if not arguments.no_build:
        engine.build(IMAGE, ETCD_IMAGE)
        timeline.say("both images are built")
    size_mb = engine.size_mb(IMAGE)
    timeline.say(f"the image has {size_mb:.0f} MB (at most {MOST_MB})")
    check(size_mb < MOST_MB, "it is too large")

    begun = time.monotonic()
    project.up()
    timeline.say(f"docker compose up -d took {time.monotonic() - begun:.1f} s")
    with project.client() as client:
        until("the example's first step", lambda: step_of(client, "digits"), NEXT_STEP_S)
        timeline.say(f"first step of the example: {time.monotonic() - begun:.1f} s after `docker compose up` began")
        check_ended(project, client, "digits", timeline)
        looked_at(project, timeline)
        submit(project, "calm", arguments.epochs)
        calm = check_ended(project, client, "calm", timeline)
        submit(project, "disturbed", arguments.epochs)
        disturb(project, client, timeline)
        bits = check_ended(project, client, "disturbed", timeline)
        check(bits == calm, f"the models differ: {bits} is not {calm}")
        timeline.say("both models have the same bits")
        timeline.say(restoring_is_seen(project, client))
    project.up()
    check("submitted before" in project.compose("logs", "example"), "a second `up` submitted the example again")
    timeline.say("a second `up` changes nothing")


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SoakError(otherwise)


def looked_at(project: Project, timeline: Timeline) -> None:
    check_nothing_published(project)
    check_restrictions(project)
    count = check_no_secret_shows(project, IMAGE)
    check(count >= 5, f"{count} secrets were found on the volumes")
    timeline.say(f"published at 127.0.0.1 alone; nobody is root; none of {count} secrets shows")


def submit(project: Project, job: str, epochs: int) -> None:
    project.cli("submit", DIGITS, "--name", job, "--epochs", str(epochs), "--max-trainers", "2", "--pservers", "1")


def check_ended(project: Project, client: Client, job: str, timeline: Timeline) -> str:
    """Its model's SHA-256."""
    ended = until(f"the end of {job}", lambda: _ended(client, job), JOB_S, every_s=0.5)
    check(ended.standing == Standing.COMPLETED, f"{job} is {ended.standing}: {ended.reason}")
    assert ended.result is not None
    accuracy = ended.result.metrics["accuracy"]
    check(accuracy >= LEAST_ACCURACY, f"the accuracy of {job} is {accuracy}")
    model = project.cli("python", "-c", DIGEST, f"/storage/jobs/{job}/export/model.safetensors").strip()
    timeline.say(f"{job} is COMPLETED: accuracy {accuracy:.4f}, step {ended.progress.step}, model {model[:16]}")
    return model


def _ended(client: Client, job: str):
    found = client.get_job(job)
    return found if found.standing in (Standing.COMPLETED, Standing.FAILED, Standing.CANCELLED) else None


def disturb(project: Project, client: Client, timeline: Timeline) -> None:
    """Resizes and kills, each while the job trains."""
    trains(client, 0)
    for trainers, pservers in ((4, 1), (4, 2)):
        resized(client, trainers, pservers, timeline)
    for service in ("pserver", "master", "etcd", "trainer"):
        killed(project, client, service, timeline)
    etcd_away(project, client, timeline)
    resized(client, 1, 2, timeline)
    trains(client, step_of(client, "disturbed"))


def trains(client: Client, since: int, steps: int = KEPT_STEPS) -> None:
    def far_enough() -> bool:
        found = client.get_job("disturbed")
        check(
            found.standing in (Standing.QUEUED, Standing.ACTIVE), f"the job ended too early, {found.standing}: --epochs"
        )
        return (found.progress.step or 0) > since + steps

    until("steps of the job", far_enough, NEXT_STEP_S)


def resized(client: Client, trainers: int, pservers: int, timeline: Timeline) -> None:
    before, begun = step_of(client, "disturbed"), time.monotonic()
    resize = client.create_resize("disturbed", trainers=trainers, pservers=pservers)
    done = client.wait_for_resize("disturbed", resize.resize_id, timeout_s=JOB_S)
    check(not done.error_code, f"the resize failed: {done.error_code} {done.reason}")

    def there() -> bool:
        members = client.get_job("disturbed").members
        return (members.trainers, members.pservers) == (trainers, pservers)

    until(f"{trainers} trainers and {pservers} parameter servers", there, NEXT_STEP_S)
    took = time.monotonic() - begun
    timeline.say(
        f"resized at step {before} to {trainers} trainers and {pservers} parameter servers in {took:.1f} s, "
        f"{done.bytes_moved} bytes moved, longest pause {1000 * done.longest_pause_s:.0f} ms"
    )
    trains(client, step_of(client, "disturbed"))


def killed(project: Project, client: Client, service: str, timeline: Timeline) -> None:
    """One that works for the job; then what is missing is started again, as a user would."""
    name = working(project, client, service)
    furthest, begun = step_of(client, "disturbed"), time.monotonic()
    project.kill(name)
    if service == "etcd":  # there is one; the others have somebody in reserve
        project.up(service)
    until(f"a step after {name} was killed", lambda: step_of(client, "disturbed") > furthest, NEXT_STEP_S)
    took = time.monotonic() - begun
    project.up()
    timeline.say(f"killed {name} at step {furthest}: {took:.1f} s until a later step was seen")
    until("all to be healthy", lambda: all_healthy(project), NEXT_STEP_S)
    trains(client, furthest)


def etcd_away(project: Project, client: Client, timeline: Timeline) -> None:
    """Members are unready then, and are not restarted for it."""
    before = started(project)
    project.kill(working(project, client, "etcd"))
    services = ("master", "trainer", "pserver")
    until(
        "all to be unhealthy without etcd",
        lambda: all(each == "unhealthy" for service in services for each in project.health(service).values()),
        NEXT_STEP_S,
    )
    project.up("etcd")
    until("all to be healthy", lambda: all_healthy(project), NEXT_STEP_S)
    check(started(project) == before, "a service was restarted because etcd was away")
    trains(client, step_of(client, "disturbed"))
    timeline.say("without etcd masters and members are unhealthy, and none is restarted")


def started(project: Project) -> dict[str, str]:
    """When each container that needs etcd was started last."""
    found = [each for service in ("master", "trainer", "pserver") for each in project.containers(service)]
    return {each["Name"]: each["State"]["StartedAt"] for each in found}


def all_healthy(project: Project) -> bool:
    return all(each == "healthy" for each in project.health("").values() if each != "none")


def working(project: Project, client: Client, service: str) -> str:
    """A container that runs a member of the job."""
    found = project.containers(service)
    if service == "etcd":
        return names(found)[0]
    if service == "master":
        leader = client.get_job("disturbed").master.master_id
        return names([each for each in found if each["Config"]["Hostname"] in leader])[0]
    members = {member.agent for member in client.list_pool_members() if member.job == "disturbed"}
    busy = [each for each in found if each["Config"]["Hostname"] in members]
    check(bool(busy), f"no container of {service} works for the job: {members}")
    return names(busy)[0]


if __name__ == "__main__":
    sys.exit(main())

"""`make compose-test`: the image is built, `docker compose up` trains, is scaled through REST and loses
containers and the whole Engine; the model's bits are those of an undisturbed run, also with the files of
jobs in a bucket at S3, and nothing is left.

The Engine is one of the test's own, with its data in --engine FOLDER, else in a temporary folder (root, and
the programs of Docker are installed). Otherwise it is the machine's (DOCKER_HOST, as for docker), which is
not restarted.

BASE_IMAGE, BUILD_IMAGE: as in docs/docker.md; without them Docker Hub's Python, else a Debian that
debootstrap makes.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.compose import engine, object_storage, private_engine, restarts, s3_server
from tests.compose.jobs import (
    EXAMPLE,
    JOB_S,
    NEXT_STEP_S,
    Timeline,
    check,
    check_ended,
    looked_at,
    submit,
    trains,
    working,
)
from tests.compose.private_engine import PrivateEngine
from tests.compose.project import Project, step_of, until
from tests.compose.restoring import restoring_is_seen
from tests.soak.run import SoakError
from trireme.client import Client
from trireme_shared.platform.runtime import ids, telemetry

IMAGE, ETCD_IMAGE = "trireme-test:latest", "trireme-test-etcd:latest"
MOST_MB = 1150
PARTS = ("volumes", "restarts", "s3")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compose", description=__doc__)
    parser.add_argument(
        "--epochs", type=int, default=350, help="of each of the two jobs (default: 350, 23 steps each)"
    )
    parser.add_argument("--port", type=int, default=8479, help="where the API is published (default: 8479)")
    parser.add_argument("--no-build", action="store_true", help=f"take {IMAGE} and {ETCD_IMAGE} as they are")
    parser.add_argument("--keep", action="store_true", help="leave the containers running")
    parser.add_argument(
        "--engine", type=Path, metavar="FOLDER", help="where the test's own Engine keeps its data"
    )
    parser.add_argument(
        "--only", choices=PARTS, action="append", help="this part; may be given several times"
    )
    arguments = parser.parse_args()
    telemetry.configure(level="ERROR", json=False)
    with contextlib.ExitStack() as opened:
        own, why = None, private_engine.missing()
        if not why:
            own = opened.enter_context(PrivateEngine(arguments.engine))
        if why and arguments.engine:
            sys.stderr.write(f"no Engine in {arguments.engine}: {why}\n")
            return 2
        if lacking := engine.missing():
            sys.stderr.write(f"no Docker Engine to test with: {lacking}{f'; and {why}' if why else ''}\n")
            return 2
        return run(arguments, own, why)


def run(arguments: argparse.Namespace, own: PrivateEngine | None, why: str) -> int:
    """`own`: the test's Engine; None: there can be none, because of `why`."""
    name = f"trireme-test-{ids.secret()[:8]}".lower()
    images = {"TRIREME_IMAGE": IMAGE, "ETCD_IMAGE": ETCD_IMAGE, "API_PORT": str(arguments.port)}
    many = {**images, "TRAINERS": "4", "PSERVERS": "3", "MASTERS": "2", "EXAMPLE": EXAMPLE}
    few = {**images, "TRAINERS": "2", "PSERVERS": "2", "MASTERS": "1", "EXAMPLE": EXAMPLE}
    timeline = Timeline()
    timeline.say(f"{engine.machine()}; project {name}")
    if not arguments.no_build:
        engine.build(IMAGE, ETCD_IMAGE)
        timeline.say("both images are built")
    calm = ""

    def on_volumes(project: Project) -> None:
        nonlocal calm
        calm = scenario(project, arguments, timeline)

    def with_restarts(project: Project) -> None:
        assert own is not None
        restarts.scenario(project, own, arguments.epochs, calm, timeline)

    def on_s3(project: Project) -> None:
        project.environment["S3_IMAGE"] = s3_server.image()
        object_storage.scenario(project, arguments.epochs, calm, timeline)

    projects = {
        "volumes": (on_volumes, Project(name, many)),
        "restarts": (with_restarts, Project(f"{name}-r", {**few, "EXAMPLE": ""})),
        "s3": (on_s3, Project(f"{name}-s3", few, s3_server.ENV_FILE, object_storage.BUCKET)),
    }
    for part in arguments.only or PARTS:
        if part == "restarts" and own is None:
            timeline.say(f"the Engine is not restarted: {why}")
            continue
        if not passes(*projects[part], timeline, keep=arguments.keep):
            return 1
    timeline.say("passed")
    return 0


def has_trained(client: Client, job: str) -> bool:
    """A job that is over has no step any more."""
    return bool(step_of(client, job)) or client.get_job(job).result is not None


def passes(part: Callable[[Project], None], project: Project, timeline: Timeline, *, keep: bool) -> bool:
    """With what is said of a failure, and the project's end."""
    try:
        part(project)
    except SoakError as error:
        timeline.say(f"FAILED: {error}")
        for service in ("setup", "master", "pserver", "trainer", "etcd", "s3"):
            with contextlib.suppress(SoakError):  # not each project has all of them
                timeline.say(project.compose("logs", "--tail", "15", service)[-4000:])
        return False
    finally:
        if not keep:
            timeline.say("docker compose down --volumes")
            project.down()
    if keep:
        return True
    if left := project.remains():
        timeline.say(f"FAILED: these are left: {', '.join(left)}")
        return False
    timeline.say("no container, volume or network is left")
    return True


def scenario(project: Project, arguments: argparse.Namespace, timeline: Timeline) -> str:
    """The digest of the undisturbed model."""
    size_mb = engine.size_mb(IMAGE)
    timeline.say(f"the image has {size_mb:.0f} MB (at most {MOST_MB})")
    check(size_mb < MOST_MB, "it is too large")

    begun = time.monotonic()
    project.up()
    timeline.say(f"docker compose up -d took {time.monotonic() - begun:.1f} s")
    with project.client() as client:
        until("the example's first step", lambda: has_trained(client, EXAMPLE), NEXT_STEP_S)
        timeline.say(
            f"the example trains, or has: {time.monotonic() - begun:.1f} s after `docker compose up` began"
        )
        check_ended(project, client, EXAMPLE, timeline)
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
    check(
        "submitted before" in project.compose("logs", "example"), "a second `up` submitted the example again"
    )
    timeline.say("a second `up` changes nothing")
    return calm


def disturb(project: Project, client: Client, timeline: Timeline) -> None:
    """Resizes and kills, each while the job trains."""
    trains(client, 0, "disturbed")
    for trainers, pservers in ((4, 1), (4, 2)):
        resized(client, trainers, pservers, timeline)
    for service in ("pserver", "master", "etcd", "trainer"):
        killed(project, client, service, timeline)
    etcd_away(project, client, timeline)
    resized(client, 1, 2, timeline)
    trains(client, step_of(client, "disturbed"), "disturbed")


def resized(client: Client, trainers: int, pservers: int, timeline: Timeline) -> None:
    before, begun = step_of(client, "disturbed"), time.monotonic()
    resize = client.create_resize("disturbed", trainers=trainers, pservers=pservers)
    done = client.wait_for_resize("disturbed", resize.operation_id, timeout_s=JOB_S)
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
    trains(client, step_of(client, "disturbed"), "disturbed")


def killed(project: Project, client: Client, service: str, timeline: Timeline) -> None:
    """One that works for the job; then what is missing is started again, as a user would."""
    name = working(project, client, service, "disturbed")
    furthest, begun = step_of(client, "disturbed"), time.monotonic()
    project.kill(name)
    if service == "etcd":  # there is one; the others have somebody in reserve
        project.up(service)
    until(f"a step after {name} was killed", lambda: step_of(client, "disturbed") > furthest, NEXT_STEP_S)
    took = time.monotonic() - begun
    project.up()
    timeline.say(f"killed {name} at step {furthest}: {took:.1f} s until a later step was seen")
    until("all to be healthy", lambda: all_healthy(project), NEXT_STEP_S)
    trains(client, furthest, "disturbed")


def etcd_away(project: Project, client: Client, timeline: Timeline) -> None:
    """Members are unready then, and are not restarted for it."""
    before = started(project)
    project.kill(working(project, client, "etcd", "disturbed"))
    services = ("master", "trainer", "pserver")
    until(
        "all to be unhealthy without etcd",
        lambda: all(each == "unhealthy" for service in services for each in project.health(service).values()),
        NEXT_STEP_S,
    )
    project.up("etcd")
    until("all to be healthy", lambda: all_healthy(project), NEXT_STEP_S)
    check(started(project) == before, "a service was restarted because etcd was away")
    trains(client, step_of(client, "disturbed"), "disturbed")
    timeline.say("without etcd masters and members are unhealthy, and none is restarted")


def started(project: Project) -> dict[str, str]:
    """When each container that needs etcd was started last."""
    found = [each for service in ("master", "trainer", "pserver") for each in project.containers(service)]
    return {each["Name"]: each["State"]["StartedAt"] for each in found}


def all_healthy(project: Project) -> bool:
    return all(each == "healthy" for each in project.health("").values() if each != "none")


if __name__ == "__main__":
    sys.exit(main())

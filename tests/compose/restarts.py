"""The Engine is restarted, in order and by a power cut, while a job trains: all containers come back by
themselves, those that the launcher has started too, and the job ends with the bits of an undisturbed run."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.compose.jobs import JOB_S, NEXT_STEP_S, Timeline, check, check_ended, submit, trains
from tests.compose.private_engine import PrivateEngine
from tests.compose.project import Project, names, step_of, until
from trireme.client import Client

JOB = "restarted"
BACK_S = 600.0
SERVICES = ("etcd", "master", "api", "trainer", "pserver", "launcher")


def scenario(project: Project, engine: PrivateEngine, epochs: int, calm: str, timeline: Timeline) -> None:
    """`calm`: the digest of the undisturbed model; "": it is made here."""
    project.environment |= {
        "COMPOSE_PROFILES": "launcher",
        "DOCKER_SOCKET": str(engine.socket),
        "DOCKER_GID": str(engine.socket.stat().st_gid),
    }
    project.up()
    with project.client() as client:
        until("the cluster", lambda: client.list_pool_members(), BACK_S)
        if not calm:
            submit(project, "calm", epochs)
            calm = check_ended(project, client, "calm", timeline)
        submit(project, JOB, epochs)
        trains(client, 0, JOB)
        launched(project, client, timeline)
        for what, restart in (("in order", engine.restart_in_order), ("by a power cut", engine.power_cut)):
            restarted(project, client, what, restart, timeline)
        bits = check_ended(project, client, JOB, timeline)
        check(bits == calm, f"the models differ: {bits} is not {calm}")
        timeline.say("both models have the same bits")


def launched(project: Project, client: Client, timeline: Timeline) -> None:
    """The job gets one trainer more than compose has places for."""
    resize = client.create_resize(JOB, trainers=3)
    done = client.wait_for_resize(JOB, resize.operation_id, timeout_s=JOB_S)
    check(not done.error_code, f"the resize failed: {done.error_code} {done.reason}")
    until("the launched trainer to work", lambda: client.get_job(JOB).members.trainers == 3, NEXT_STEP_S)
    timeline.say(f"the launcher has started {', '.join(_launched(project))}")


def restarted(
    project: Project, client: Client, what: str, restart: Callable[[], float], timeline: Timeline
) -> None:
    """Nobody calls compose."""
    before, furthest = _running(project), step_of(client, JOB)
    began = time.monotonic()
    away_s = restart()

    until(f"all of {before} to be back", lambda: _running(project) == before, BACK_S, every_s=0.5)
    until("a later step", lambda: step_of(client, JOB) > furthest, BACK_S)
    step_s = time.monotonic() - began
    healthy: set[str] = set()

    def all_were_healthy() -> bool:
        """Each of them once: on a busy machine a check may fail now and then."""
        healthy.update(_healthy(project))
        return healthy == set(before)

    until("all of them to be healthy", all_were_healthy, BACK_S, every_s=0.5)
    timeline.say(
        f"restarted the Engine {what} at step {furthest}: it was away for {away_s:.1f} s, and a later step "
        f"was seen after {step_s:.1f} s"
    )
    until("as many trainers", lambda: client.get_job(JOB).members.trainers == 3, BACK_S)
    trains(client, furthest, JOB)


def _running(project: Project) -> list[str]:
    return sorted({*(name for service in SERVICES for name in names(project.containers(service)))})


def _launched(project: Project) -> list[str]:
    return [name for name in _running(project) if "-launched-" in name]


def _healthy(project: Project) -> set[str]:
    found = {name: state for service in SERVICES for name, state in project.health(service).items()}
    return {name for name, state in found.items() if state == "healthy"}

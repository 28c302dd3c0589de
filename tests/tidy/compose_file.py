"""docker-compose.yml, the Dockerfile and what belongs to them, as the tests of this folder read them."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE = yaml.safe_load(TEXT)
S3_TEXT = (ROOT / "docker" / "s3.yml").read_text()
ALONE = COMPOSE["services"]
WITH_S3 = yaml.safe_load(S3_TEXT)["services"]
SERVICES = {**ALONE, "s3": WITH_S3["s3"]}  # of all files
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
ENTRYPOINT = (ROOT / "docker" / "entrypoint.sh").read_text()
IGNORED = (ROOT / ".dockerignore").read_text().split("\n")
DOCS = (ROOT / "docs" / "docker.md").read_text()
UID = "10001:10001"


def with_defaults(text: str) -> str:
    """What compose makes of ${NAME:-default} and ${NAME-default} if no variable is set."""
    return re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", text)


def mounts(name: str) -> dict[str, tuple[str, str]]:
    """By place in the container: (volume or folder, "", "ro" or "nocopy")."""
    found = {}
    for text in SERVICES[name].get("volumes", []):
        source, _, rest = with_defaults(text).rpartition(":") if ":" in text else ("", "", text)
        if rest in ("ro", "rw", "nocopy"):
            source, _, place = source.rpartition(":")
            found[place] = (source, rest)
        else:
            found[rest] = (source, "")
    return found


def on_network(network: str) -> set[str]:
    return {name for name, service in SERVICES.items() if network in service.get("networks", [])}


def variables_of(env_file: str) -> dict[str, str]:
    lines = (ROOT / "docker" / env_file).read_text().split("\n")
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))

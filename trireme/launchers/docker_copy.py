"""A new container as those of a compose service: what `docker inspect` says of one of them, made into a request to create another.

Image, command, environment, volumes, limits, networks, health check and labels are the same, so nothing has to be said twice. Its own:
name, the number of places, no published ports, and the Engine starts it again whatever its end was.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trireme.launchers.launcher import Role

PROJECT, SERVICE, ONE_OFF = "com.docker.compose.project", "com.docker.compose.service", "com.docker.compose.oneoff"
CLUSTER, ROLE, ID = "trireme.cluster", "trireme.role", "trireme.id"
GRACE_S = 60  # for members to save and leave, if the service says nothing; the Engine's own 10 s are too short
ENVIRONMENT = {"trainer": "TRIREME_TRAINERS", "pserver": "TRIREME_PSERVERS"}

# of one container alone
_CONFIG = ("Hostname", "MacAddress", "AttachStdin", "AttachStdout", "AttachStderr", "OpenStdin", "StdinOnce", "Tty")
_HOST = (
    "PortBindings",
    "PublishAllPorts",
    "ContainerIDFile",
    "AutoRemove",
    "Links",
    "RestartPolicy",
    "Binds",
    "Mounts",
)
_WITHOUT_NAME = re.compile(r"[0-9a-f]{64}(:|$)")  # a volume that belongs to one container; a new container gets its own


@dataclass(frozen=True, slots=True)
class Creation:
    """`body`: of POST /containers/create. `networks`: those it must be connected to before it starts, with the endpoint in each; an
    Engine before API 1.44 takes only one in the body."""

    body: dict[str, Any]
    networks: Mapping[str, Mapping[str, Any]]


def copy_of(found: Mapping[str, Any], cluster: str, role: Role, name: str) -> Creation:
    """`found`: as `docker inspect` shows it. `name`: of the new container and of its host agent."""
    config = {key: value for key, value in found["Config"].items() if key not in _CONFIG}
    host = {key: value for key, value in found["HostConfig"].items() if key not in _HOST}
    places = {variable: str(int(kind == role)) for kind, variable in ENVIRONMENT.items()}
    binds = [bind for bind in found["HostConfig"].get("Binds") or () if not _WITHOUT_NAME.match(bind)]
    networks = _networks(found)
    mode = str(host.get("NetworkMode", ""))
    first = mode if mode in networks else next(iter(networks), "")
    body = {
        **config,
        "Image": found["Image"],  # the very one, also if its tag has moved on
        "Env": _with(config.get("Env") or (), {"TRIREME_NAME": name, **places}),
        "Labels": {**(config.get("Labels") or {}), ONE_OFF: "True", CLUSTER: cluster, ROLE: role, ID: name},
        "StopTimeout": config.get("StopTimeout") or GRACE_S,
        "HostConfig": {**host, "Binds": binds, "Mounts": _mounts(found), "RestartPolicy": {"Name": "unless-stopped"}},
        "NetworkingConfig": {"EndpointsConfig": {first: networks[first]} if first else {}},
    }
    return Creation(body, {network: endpoint for network, endpoint in networks.items() if network != first})


def _with(environment: Any, changed: Mapping[str, str]) -> list[str]:
    kept = [line for line in environment if line.partition("=")[0] not in changed]
    return [*kept, *(f"{name}={value}" for name, value in changed.items())]


def _mounts(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    mounts = []
    for mount in found["HostConfig"].get("Mounts") or ():
        own = mount["Type"] == "volume" and _WITHOUT_NAME.match(mount.get("Source") or "")
        mounts.append({**mount, "Source": ""} if own else dict(mount))
    return mounts


def _networks(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Names and endpoints. Addresses are the Engine's to give; names of the copied container itself are left out."""
    mode = str(found["HostConfig"].get("NetworkMode", ""))
    if mode in ("host", "none") or mode.startswith("container:"):
        return {}
    own = {found["Id"][:12], found["Name"].lstrip("/")}
    networks = (found.get("NetworkSettings") or {}).get("Networks") or {}
    return {
        name: {"Aliases": [alias for alias in endpoint.get("Aliases") or () if alias not in own]}
        for name, endpoint in sorted(networks.items())
    }

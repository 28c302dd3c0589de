"""One compose project of the test, from `up` until nothing of it is left."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tests.compose.engine import compose_command, output, run
from tests.soak.run import SoakError
from trireme.client import Client
from trireme.containers.secrets import KEY
from trireme_shared.protocol.errors import TriremeError

DIGITS = "/opt/trireme/examples/digits/digits.py"
T = TypeVar("T")
SECRETS = "find /secrets -type f ! -name table.json"  # the table has hashes of tokens


@dataclass
class Project:
    name: str
    environment: dict[str, str]
    env_file: str = ""
    storage: str = "/storage/jobs"
    token: str = ""

    def compose(self, *arguments: str, timeout_s: float = 300) -> str:
        return run(self._command(*arguments), timeout_s=timeout_s, environment=self.environment)

    def _command(self, *arguments: str) -> list[str]:
        file = ["--env-file", self.env_file] if self.env_file else []
        return [*compose_command(), *file, "--project-name", self.name, *arguments]

    def up(self, *services: str, **counts: int) -> None:
        scale = [part for name, count in counts.items() for part in ("--scale", f"{name}={count}")]
        self.compose("up", "--detach", "--no-recreate", "--no-build", *scale, *services, timeout_s=600)

    def cli(self, *arguments: str, timeout_s: float = 300) -> str:
        return self.compose("run", "--rm", "-T", "cli", *arguments, timeout_s=timeout_s)

    def cat(self, place: str) -> bytes:
        """The content of a file of the storage."""
        return output(self._command("run", "--rm", "-T", "cli", "cat", place), environment=self.environment)

    def client(self) -> Client:
        """Of the API where it is published."""
        if not self.token:
            self.token = self.cli("show-token").strip()
        return Client(f"http://127.0.0.1:{self.environment['API_PORT']}", token=self.token)

    def containers(self, service: str = "", *, all_of_them: bool = False) -> list[dict[str, Any]]:
        labels = [f"com.docker.compose.project={self.name}"]
        if service:
            labels.append(f"com.docker.compose.service={service}")
        filters = [part for label in labels for part in ("--filter", f"label={label}")]
        ids = run(["docker", "ps", "--quiet", *(["--all"] if all_of_them else []), *filters]).split()
        return json.loads(run(["docker", "inspect", *ids])) if ids else []

    def health(self, service: str) -> dict[str, str]:
        """By container's name: healthy, unhealthy, starting."""
        found = self.containers(service)
        return {
            each["Name"].strip("/"): each["State"].get("Health", {}).get("Status", "none") for each in found
        }

    def kill(self, name: str) -> None:
        run(["docker", "kill", name])

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", timeout_s=300)

    def remains(self) -> list[str]:
        """Containers, volumes and networks that are still there."""
        label = f"label=com.docker.compose.project={self.name}"
        found = [each["Name"] for each in self.containers(all_of_them=True)]
        for kind in ("volume", "network"):
            found += run(["docker", kind, "ls", "--quiet", "--filter", label]).split()
        return found


def until(what: str, ask: Callable[[], T], timeout_s: float, every_s: float = 0.05) -> T:
    """The first answer that is true. Answers that fail are asked for again: masters come and go."""
    end, last = time.monotonic() + timeout_s, ""
    while time.monotonic() < end:
        try:
            if found := ask():
                return found
        except (TriremeError, SoakError) as error:
            last = f": {error}"
        time.sleep(every_s)
    msg = f"{what}: not within {timeout_s:.0f} s{last}"
    raise SoakError(msg)


def step_of(client: Client, job: str) -> int:
    return client.get_job(job).progress.step or 0


def check_nothing_published(project: Project) -> None:
    """Beyond loopback."""
    for each in project.containers(all_of_them=True):
        for port, where in (each["NetworkSettings"]["Ports"] or {}).items():
            for binding in where or ():
                if binding["HostIp"] != "127.0.0.1":
                    msg = f"{each['Name']} publishes {port} at {binding['HostIp']}"
                    raise SoakError(msg)


def check_restrictions(project: Project) -> None:
    """Nobody is root, may write to the image, or gain rights."""
    for each in project.containers(all_of_them=True):
        host, user = each["HostConfig"], each["Config"]["User"]
        wrong = [
            *(["runs as root"] if user in ("", "0", "root", "0:0") else []),
            *(["has a root file system that can be written"] if not host["ReadonlyRootfs"] else []),
            *(["keeps capabilities"] if host["CapDrop"] != ["ALL"] else []),
            *(["is privileged"] if host["Privileged"] else []),
            *(["has no limit of memory"] if not host["Memory"] and "etcd" not in each["Name"] else []),
        ]
        if wrong:
            msg = f"{each['Name']} {', '.join(wrong)}"
            raise SoakError(msg)


def check_no_secret_shows(project: Project, image: str) -> int:
    """In environments, arguments, logs or the image's history. How many secrets there are."""
    volumes = [
        name for name in run(["docker", "volume", "ls", "--quiet"]).split() if name.startswith(project.name)
    ]
    mounts = [f"{name}:/secrets/{name}:ro" for name in volumes if "secrets" in name]
    options = [part for mount in mounts for part in ("--volume", mount)]
    script = f"{SECRETS} -exec cat {{}} \\; -exec echo \\;"
    text = run(
        ["docker", "run", "--rm", "--network", "none", *options, "--entrypoint", "sh", image, "-c", script]
    )
    secrets = {word for word in re.findall(r"[\w-]+", text) if len(word) >= 20} - {KEY}
    places = {"the image's history": run(["docker", "history", "--no-trunc", image])}
    for each in project.containers(all_of_them=True):
        places[each["Name"]] = json.dumps(each)
        places[f"the log of {each['Name']}"] = both_logs(each["Id"])
    for secret in secrets:
        for place, shown in places.items():
            if secret in shown:
                msg = f"{place} shows a secret"
                raise SoakError(msg)
    return len(secrets)


def both_logs(container: str) -> str:
    return run(["sh", "-c", f"docker logs {container} 2>&1"])


def names(found: Sequence[dict[str, Any]]) -> list[str]:
    return sorted(each["Name"].strip("/") for each in found)

"""docker/entrypoint.sh: where a service of a container listens, by which address others reach it, its
name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "docker" / "entrypoint.sh"
PYTHON3 = """#!{python}
import socket, sys
class Socket(socket.socket):
    def connect(self, address):
        if self.family is not socket.{family}:
            raise OSError("no way out")
        super().connect(("{own}", address[1]))
socket.socket = Socket
exec(sys.argv[-1])
"""


def started(folder: Path, family: str = "AF_INET", own: str = "127.0.0.1", **given: str) -> dict[str, str]:
    """The variables with which it starts a master. Packets leave the container by `family` alone, from its
    address `own`."""
    programs = {
        "python3": PYTHON3.format(python=sys.executable, family=family, own=own),
        "python": "#!/bin/sh\nenv\n",
        "hostname": "#!/bin/sh\necho box\n",
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", **given}
    command = ["bash", str(SCRIPT), "master"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=True)
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("family", "own", "listens"), [("AF_INET", "127.0.0.1", "0.0.0.0"), ("AF_INET6", "::1", "::")]
)
def test_a_service_is_reached_by_the_addresses_that_its_container_has(tmp_path, family, own, listens):
    found = started(tmp_path, family, own)
    assert (found["TRIREME_ADVERTISE"], found["TRIREME_HOST"]) == (own, listens)


def test_what_somebody_has_set_stays_and_a_link_of_dockers_is_no_name(tmp_path):
    own = {"TRIREME_HOST": "10.0.0.5", "TRIREME_ADVERTISE": "fd00::5", "TRIREME_NAME": "mine"}
    assert started(tmp_path, **own).items() >= own.items()
    assert started(tmp_path, TRIREME_NAME="/web/trireme")["TRIREME_NAME"] == "master-box"

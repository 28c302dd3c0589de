"""Which TRIREME_* variables of the environment are settings of ours.

Kubernetes (enableServiceLinks) and Docker (links) put addresses of other services into the environment of a
container, under names that they make of the services' names. Beside a Service that is called `trireme`:

    TRIREME_SERVICE_HOST=10.9.8.7   TRIREME_PORT=tcp://10.9.8.7:8470   TRIREME_PORT_8470_TCP=...
    TRIREME_NAME=/web/trireme       by Docker alone

Nobody has set these for us, so they count as not given. A value that merely looks like one is kept, and
whoever reads it refuses it by its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

PREFIX = "TRIREME_"
_ADDRESS = re.compile(r"(tcp|udp|sctp)://(.+):(\d+)")


def without_service_links(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables without those of service links that have names of settings. Names of settings may be
    written in lower case."""
    given = {name.upper(): value for name, value in environment.items()}
    return {name: value for name, value in environment.items() if not _is_link(name.upper(), value, given)}


def _is_link(name: str, value: str, given: Mapping[str, str]) -> bool:
    if not name.startswith(PREFIX):
        return False
    service, _, last = name.rpartition("_")
    if last == "PORT":
        return _is_port_of(service, value, given)
    port = given.get(f"{service}_PORT", "")
    return last == "NAME" and value.startswith("/") and _is_port_of(service, port, given)


def _is_port_of(service: str, value: str, given: Mapping[str, str]) -> bool:
    """Whether `<service>_PORT` has this value because of a service: other variables then tell the same."""
    address = _ADDRESS.fullmatch(value)
    if address is None:
        return False
    protocol, _, port = address.groups()
    return f"{service}_SERVICE_HOST" in given or f"{service}_PORT_{port}_{protocol.upper()}" in given

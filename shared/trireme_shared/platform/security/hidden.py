"""Texts of others (a library's error, what a script prints) and addresses without credentials, before they are logged or answered."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^/@\s'\"]*@")
_SECRET = re.compile(r"KEY|TOKEN|PASSWORD|SECRET|CREDENTIAL")
SHORTEST = 6  # shorter values would blot out words


def hidden(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Without what stands before @ in URLs, and without the values of variables whose names say that they are secret."""
    for name, value in environment.items():
        if len(value) >= SHORTEST and _SECRET.search(name.upper()) and value in text:
            text = text.replace(value, "***")
    return _USER.sub(r"\1***@", text)


def without_user(addresses: str) -> str:
    """Addresses of etcd, with commas between, without what stands before @ in them: who wants to log in gives user and password beside
    the address, and these would be shown. A path of a UNIX socket may have an @."""
    return ",".join(map(_bare, addresses.split(",")))


def _bare(address: str) -> str:
    scheme, mark, rest = address.partition("://") if "://" in address else ("", "", address)
    return address if scheme.strip().endswith("unix") else f"{scheme}{mark}{rest.rpartition('@')[2]}"

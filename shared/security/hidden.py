"""Texts of others (a library's error, what a script prints) without credentials, before they are logged or answered."""

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

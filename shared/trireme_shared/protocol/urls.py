"""Paths and URLs that users give: whole where a file is opened, without their passwords in whatever sentence
is made of them.

a job's spec ─► Url ─► opened, joined, stored: whole
                 └─► f"{url}", repr: without passwords

A file that a glob names is no Url any more. So the places where texts leave a process leave passwords out of
any text: answers of REST (master_service/api/middleware.py), logs (`telemetry.configure`), errors on the
command line.
"""

from __future__ import annotations

import re

# a backslash ends a text in JSON, or stands for a line break there
_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^/\s'\"\\]*@")
_PARAMETER = re.compile(
    r"([?&][\w.-]*(?:password|passwd|secret|token|sig|signature|credential|access_?key|api_?key)=)"
    r"[^&#\s'\"\\]+",
    re.IGNORECASE,
)
HIDDEN = "***"


def without_passwords(text: str) -> str:
    """Without what stands before @ in URLs, and without the values of their parameters whose names say that
    they are secret (as those of a signed URL do). `text` may be JSON."""
    if "://" not in text:
        return text
    if "@" in text:
        text = _USER.sub(rf"\1{HIDDEN}@", text)
    return _PARAMETER.sub(rf"\1{HIDDEN}", text) if "=" in text else text


class Url(str):
    """Equal to the text that it is made of, whose parts are plain text again."""

    __slots__ = ()

    @property
    def shown(self) -> str:
        """Without a user's password, and without the secret parameters of a signed URL."""
        return without_passwords(str(self))

    def __repr__(self) -> str:
        return repr(self.shown)

    def __format__(self, spec: str) -> str:
        return format(self.shown, spec)

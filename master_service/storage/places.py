"""Where jobs of a cluster may write: below the cluster's storage, or below another place that its owner has
allowed. Whoever submits a job chooses a place among these; masters and members write there as the cluster's
user, who may write much more (`/etc/cron.d`, another bucket)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from trireme_shared.platform.runtime.telemetry import hidden
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import InvalidArgument

LOCAL = ("", "file", "local")
UP = frozenset({".", ".."})


@dataclass(frozen=True, slots=True)
class _Place:
    """`store`: scheme and host, or bucket, of a URL; "" for files of this machine."""

    store: str
    folders: tuple[str, ...]

    def holds(self, other: _Place) -> bool:
        """Whether `other` is this place or lies below it."""
        return self.store == other.store and other.folders[: len(self.folders)] == self.folders


def check_place(url: str, allowed: Sequence[str]) -> None:
    """Raises InvalidArgument unless `url` is one of the places `allowed`, or lies below one, also after
    symbolic links are followed. Blocks: it looks at the local file system; nothing else is asked."""
    given = _place_of(url)
    if any(_place_of(each).holds(given) for each in allowed):
        return
    places = ", ".join(allowed)
    msg = f"storage {url} is not below {places}: the jobs of this cluster write nowhere else"
    hint = "leave storage out, or have the masters started with TRIREME_STORAGE_ALLOWED naming the place"
    raise InvalidArgument(hidden(msg), hint=hint)


def _place_of(url: str) -> _Place:
    """Raises InvalidArgument for what may mean another place than it says."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        scheme, rest = "", url
    if any(unquote(part) in UP for part in rest.split("/")):
        raise InvalidArgument(f"storage {hidden(url)} has . or .. in its path", hint="give the place itself")
    if "::" in url:
        raise InvalidArgument(
            f"storage {hidden(url)} is a chain of URLs", hint="give the URL where the files are written"
        )
    if scheme not in LOCAL:
        store, *folders = rest.rstrip("/").split("/")
        return _Place(f"{scheme}://{store}", tuple(folders))
    path = files.local_path(url)
    if path is None:  # data:...
        raise InvalidArgument(f"storage {hidden(url)} is no place for files")
    return _Place("", tuple(part for part in os.path.realpath(path).split("/") if part))

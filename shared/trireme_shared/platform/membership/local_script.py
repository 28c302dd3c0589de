"""A job's script as a file of this host, whatever its spec says of it.

source:<digest>/<file name>   in etcd, stored there by its digest ─┬─► <folder>/<digest>/<file name>
s3://bucket/train.py          read from there ─────────────────────┘   written once
/home/me/train.py             a path: it must be there on this host, as it was when the job was created
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.security import private_files
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import InvalidArgument, PeerError
from trireme_shared.protocol.keys import ClusterKeys
from trireme_shared.protocol.records.cluster import Source, stored_source

_HINT = "submit the script again: it is sent with the job"


class LocalScripts:
    """`folder`: where scripts are kept ("": a private folder below the system's temporary one)."""

    def __init__(self, etcd: Etcd, root: str, folder: str = "") -> None:
        self._etcd, self._keys, self._folder = etcd, ClusterKeys(root), folder

    def __repr__(self) -> str:
        return f"<LocalScripts in {self._folder or 'the temporary folder'}>"

    async def find(self, script: str, sources: Mapping[str, str]) -> Path:
        """`script`, `sources`: those of the job's spec. Raises ScriptChanged if a file is not what `sources`
        say; InvalidArgument if it is not there, or is not what its digest says; PeerError if etcd or the
        storage does not answer."""
        try:
            stored = stored_source(script)
        except ValueError as error:
            raise InvalidArgument(str(error), hint=_HINT) from error
        if stored is not None:
            digest, file_name = stored
            source = (await self._stored(script, digest)).with_fields(file_name=file_name)
        elif (path := files.local_path(script)) is None:
            source = await self._remote(script)
        elif (found := at_home(path)).is_file():
            await asyncio.to_thread(check_digests, found, sources)
            return found
        else:
            raise InvalidArgument(
                f"there is no script {path} on host {socket.gethostname()}",
                hint="`trireme submit` sends the script with the job; else put it there on every host",
            )
        return await asyncio.to_thread(self._written, source)

    async def _stored(self, script: str, digest: str) -> Source:
        key = self._keys.source(digest)
        found = await self._etcd.get(key)
        source = read_record(Source, key, found.value) if found is not None else None
        if source is None:
            msg = (
                f"etcd has no script {script}: {key} does not exist"
                if found is None
                else f"{key} is no script"
            )
            raise InvalidArgument(msg, hint=_HINT)
        if source.digest != digest:
            msg = f"{key} holds a script with the digest {source.digest[:12]}, not {digest[:12]}"
            raise InvalidArgument(msg, hint=_HINT)
        return source

    async def _remote(self, url: str) -> Source:
        try:
            content = await asyncio.to_thread(files.read_bytes, url)
            return Source(file_name=url.rpartition("/")[2], text=content.decode())
        except (FileNotFoundError, PermissionError, ValueError) as error:
            msg = f"the script {url} cannot be read on host {socket.gethostname()}: {error}"
            raise InvalidArgument(msg, hint="check the URL, its name and who may read it") from error
        except OSError as error:
            raise PeerError(f"the script {url} cannot be read now: {error}") from error

    def _written(self, source: Source) -> Path:
        """Blocks. Another process may write the same file at the same time: each renames a complete one."""
        folder = self._own_folder() / source.digest
        for name, text in {**source.modules, source.file_name: source.text}.items():
            place, content = folder / name, text.encode()
            if not (place.is_file() and place.read_bytes() == content):
                private_files.make_missing(place.parent)
                files.write_bytes(str(place), content)
        return folder / source.file_name

    def _own_folder(self) -> Path:
        """Code is run from here, so nobody else may write into it. Raises InvalidArgument."""
        folder = (
            Path(self._folder).absolute()
            if self._folder
            else Path(tempfile.gettempdir()) / f"trireme-sources-{os.getuid()}"
        )
        private_files.make_own_folder(folder)
        return folder


def at_home(path: str | Path) -> Path:
    """Absolute, `~` as the user's home. It stays where that is not known: a user without HOME and without an
    entry in the system's list of users."""
    return Path(os.path.expanduser(path)).absolute()  # noqa: PTH111  Path.expanduser raises RuntimeError


MAX_FILES = 256  # of one job


class ScriptChanged(InvalidArgument):
    """A file is not what it was when the job was created. Not the job's failure: the job goes on with the
    files of before, or when it is started again."""

    code = "SCRIPT_CHANGED"


def digest_of(path: Path) -> str:
    """SHA-256 of the content, in hex. Blocks. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_digests(script: Path, digests: Mapping[str, str]) -> None:
    """Compare a script and the modules beside it with the digests that were fixed when the job was created:
    members do before they import.

        spec.sources = {"train.py": sha256, "features/text.py": sha256, ...}

    So all members of a job run the same code, also one that is started again after somebody has changed a
    file. The digests do not stop whoever can write both the files and the spec: those belong to the user who
    trains.

    `digests`: path below the script's folder -> digest; empty: nobody has fixed any. Blocks. Raises
    ScriptChanged.
    """
    for name, expected in digests.items():
        path = script.resolve().parent / name
        try:
            found = digest_of(path)
        except OSError as error:
            found = f"unreadable ({error.strerror})"
        if found != expected:
            msg = (
                f"{path} has changed since the job was created: its SHA-256 is {found[:12]}, the job's "
                f"spec has {expected[:12]}"
            )
            hint = "restore it, or stop the job and start it again: it then goes on with the changed file"
            raise ScriptChanged(msg, hint=hint)

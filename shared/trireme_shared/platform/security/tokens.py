"""Tokens with roles: who may do what at a service. A table of them holds hashes, never a token.

`trireme token ...` ──writes──► TRIREME_TOKENS_FILE (0600) ──read again when it changed──► Tokens.role_of(a token)

A token is 256 random bits with its role in front, `trireme_viewer_9f2c...`, so a leaked one is recognised as what it is.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records import Record
from trireme_shared.protocol.times import instant

MAX_TOKENS = 1000
FILE_BYTES = 1 << 20
LOOK_S = 1.0  # a change of the file is seen so long afterwards

log = telemetry.logger("tokens")


class Role(StrEnum):
    """ADMIN: everything. MEMBER: what trainers, parameter servers and host agents need, and reading. VIEWER: reading at masters;
    health and metrics at members."""

    ADMIN = "admin"
    MEMBER = "member"
    VIEWER = "viewer"

    def may(self, needed: Role) -> bool:
        """Whether this role includes `needed`."""
        return _RANKS[self] >= _RANKS[needed]


_RANKS = {Role.VIEWER: 0, Role.MEMBER: 1, Role.ADMIN: 2}


class TokenRecord(Record):
    """One token. `expire_time` (RFC 3339; "": never): it is refused from then on."""

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$")
    role: Role
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    create_time: str = ""
    expire_time: str = ""

    def is_over(self, now: float) -> bool:
        """`now`: seconds since 1970. A time that cannot be read is over."""
        try:
            return bool(self.expire_time) and instant(self.expire_time) <= now
        except ValueError:
            return True


class TokenTable(Record):
    """The content of TRIREME_TOKENS_FILE."""

    tokens: Annotated[tuple[TokenRecord, ...], Field(max_length=MAX_TOKENS)] = ()


def new_token(role: Role) -> str:
    """One that nobody can guess."""
    return f"trireme_{role}_{ids.secret()}"


def digest_of(token: str) -> str:
    """What a table holds of a token. Plain SHA-256 is enough for 256 random bits: they cannot be tried out."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def read_table(path: Path) -> TokenTable:
    """Raises InvalidArgument if the file cannot be read, is no table, or is not for its owner alone."""
    return parse_table(private_text(path), str(path))


def check_private(path: Path, found: os.stat_result) -> None:
    """Raises InvalidArgument unless `path` is a regular file of this user (or of root) that no other can read or write."""
    if not stat.S_ISREG(found.st_mode):
        raise InvalidArgument(f"{path} is no regular file")
    if found.st_uid not in (0, os.geteuid()):
        msg = f"{path} belongs to user {found.st_uid}, this process runs as {os.geteuid()}"
        raise InvalidArgument(msg, hint=f"chown {os.geteuid()} {path}")
    if found.st_mode & 0o077:
        msg = f"{path} has mode {stat.S_IMODE(found.st_mode):04o}: other users of this machine can use it"
        raise InvalidArgument(msg, hint=f"chmod 600 {path}")


def private_text(path: Path, limit_bytes: int = FILE_BYTES) -> str:
    """The content of a file that holds secrets. Raises InvalidArgument: see `check_private`, or it has more than `limit_bytes`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not stop us
        with os.fdopen(descriptor, "rb") as file:
            check_private(path, os.fstat(descriptor))
            content = file.read(limit_bytes + 1)
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > limit_bytes:
        raise InvalidArgument(f"{path} has more than {limit_bytes} bytes")
    return content.decode(errors="replace")


def parse_table(text: str, name: str) -> TokenTable:
    """`name`: where it comes from. Raises InvalidArgument, without any value of it: one may be a secret."""
    try:
        return TokenTable.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        msg = f"{name} is no table of tokens: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise InvalidArgument(msg, hint="`trireme token create` writes one") from None


def _state_of(path: Path) -> tuple[int, ...]:
    """Differs once the file was replaced or written."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return (found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)


class OwnToken:
    """What a process shows to others: `text`, else the content of `file`, read again when it changed (looked for at most once a
    second). Raises InvalidArgument if the file cannot be used."""

    def __init__(self, text: str = "", file: Path | None = None) -> None:
        self._file = None if text else file
        self._text, self._looked = text, clock.monotonic()
        self._seen: tuple[int, ...] = ()
        if self._file is not None:
            self._seen = _state_of(self._file)
            self._text = private_text(self._file).strip()

    def __repr__(self) -> str:
        return f"<OwnToken {'none' if not self._text else self._file or 'of the environment'}>"

    def __call__(self) -> str:
        """ "": it has none. A file that cannot be read any more leaves what was read before."""
        now = clock.monotonic()
        if self._file is None or now - self._looked < LOOK_S:
            return self._text
        self._looked = now
        if (seen := _state_of(self._file)) != self._seen:
            self._seen = seen
            try:
                self._text = private_text(self._file).strip()
            except InvalidArgument as error:
                log.warning("token_unreadable", cause=error.message, hint=error.hint)
        return self._text


class Tokens:
    """Those that a service accepts: of the table in `file`, else of `table`, else `given` as an admin's, else nobody is asked for one.
    Raises InvalidArgument if the file cannot be used. A token that comes into the file counts at once, one that goes within a
    second; a change for the worse (no table, other users can read it) is told in the log, and the table before it goes on."""

    def __init__(self, file: Path | None = None, given: str = "", table: TokenTable | None = None) -> None:
        self._file = file
        self._table = table or TokenTable()
        self._seen: tuple[int, ...] = ()
        self._looked = clock.monotonic()
        if file is not None:
            self._seen = _state_of(file)
            self._table = read_table(file)
        elif given and table is None:
            self._table = TokenTable(tokens=(TokenRecord(name="given", role=Role.ADMIN, sha256=digest_of(given)),))
        self.required = file is not None or table is not None or bool(given)

    def __repr__(self) -> str:
        return (
            f"<Tokens: {len(self._table.tokens)} of {self._file or 'the environment'}>"
            if self.required
            else "<Tokens: none>"
        )

    def role_of(self, token: str) -> Role | None:
        """None: it is unknown or over. The time that this takes tells nothing about the tokens."""
        if self._file is not None and clock.monotonic() - self._looked >= LOOK_S:
            self._follow(self._file)
        role = self._found(token)
        if role is None and self._file is not None and self._follow(self._file):
            return self._found(token)
        return role

    def _found(self, token: str) -> Role | None:
        given, now = digest_of(token), clock.wall_time()
        role = None
        for each in self._table.tokens:
            if hmac.compare_digest(each.sha256, given) and not each.is_over(now):
                role = each.role
        return role

    def _follow(self, file: Path) -> bool:
        """Whether the file has changed."""
        self._looked = clock.monotonic()
        seen = _state_of(file)
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            self._table = read_table(file)
        except InvalidArgument as error:
            log.warning("tokens_unreadable", cause=error.message, hint=error.hint)
        else:
            log.info("tokens_read", count=len(self._table.tokens))
        return True

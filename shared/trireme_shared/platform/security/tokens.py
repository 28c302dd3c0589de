"""Tokens with roles: who may do what at a service. A table of them holds hashes, never a token.

`trireme token ...` ──TokenFile──► TRIREME_TOKENS_FILE (0600)
    ──read again when it changed──► Tokens.role_of(a token)
FOLDER/tokens/{table.json, admin, member, viewer, lock}: of a run or a cluster on this machine, see
TokenFolder

A token is 256 random bits with its role in front, `trireme_viewer_9f2c...`, so a leaked one is recognised as
what it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import stat
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.security import private_files
from trireme_shared.protocol.errors import Conflict, InvalidArgument, NotFound
from trireme_shared.protocol.records import Record
from trireme_shared.protocol.records.record import misfits
from trireme_shared.protocol.times import instant, rfc3339

MAX_TOKENS = 1000
FILE_BYTES = 1 << 20
LOOK_S = 1.0  # a change of the file is seen so long afterwards

log = telemetry.logger("tokens")


class Role(StrEnum):
    """ADMIN: everything. MEMBER: what trainers, parameter servers and host agents need, and reading. VIEWER:
    reading at masters; health and metrics at members."""

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
    """What a table holds of a token. Plain SHA-256 is enough for 256 random bits: they cannot be tried
    out."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def read_table(path: Path) -> TokenTable:
    """Raises InvalidArgument if the file cannot be read, is no table, or is not for its owner alone."""
    return parse_table(private_text(path), str(path))


def check_private(path: Path, found: os.stat_result) -> None:
    """Raises InvalidArgument unless `path` is a regular file of this user (or of root) that no other can read
    or write. A file of root may be readable for a group of this process: so Kubernetes mounts secrets with
    `fsGroup`, as 0440."""
    if not stat.S_ISREG(found.st_mode):
        raise InvalidArgument(f"{path} is no regular file")
    if found.st_uid not in (0, os.geteuid()):
        msg = f"{path} belongs to user {found.st_uid}, this process runs as {os.geteuid()}"
        raise InvalidArgument(msg, hint=f"chown {os.geteuid()} {path}")
    mounted = found.st_uid == 0 and found.st_gid in _own_groups()
    if found.st_mode & (0o037 if mounted else 0o077):
        msg = f"{path} has mode {stat.S_IMODE(found.st_mode):04o}: other users of this machine can use it"
        raise InvalidArgument(msg, hint=f"chmod 600 {path}")


def _own_groups() -> set[int]:
    """Those of this process, without root's own: accounts of a machine are in that one."""
    return {os.getegid(), *os.getgroups()} - {0}


def private_text(path: Path, limit_bytes: int = FILE_BYTES) -> str:
    """The content of a file that holds secrets. Raises InvalidArgument: see `check_private`, or it has more
    than `limit_bytes`."""
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
        msg = f"{name} is no table of tokens: {misfits(error)}"
        raise InvalidArgument(msg, hint="`trireme token create` writes one") from None


def _state_of(path: Path) -> tuple[int, ...]:
    """Differs once the file was replaced or written."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return (found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)


class OwnToken:
    """What a process shows to others: `text`, else the content of `file`, read again when it changed (looked
    for at most once a second). Raises InvalidArgument if the file cannot be used."""

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
    """Those that a service accepts: of the table in `file`, else of `table`, else `given` as an admin's, else
    nobody is asked for one. Raises InvalidArgument if the file cannot be used. A token that comes into the
    file counts at once, one that goes within a second; a change for the worse (no table, other users can read
    it) is told in the log, and the table before it goes on."""

    def __init__(self, file: Path | None = None, given: str = "", table: TokenTable | None = None) -> None:
        self._file = file
        self._table = table or TokenTable()
        self._seen: tuple[int, ...] = ()
        self._looked = clock.monotonic()
        if file is not None:
            self._seen = _state_of(file)
            self._table = read_table(file)
        elif given and table is None:
            self._table = TokenTable(
                tokens=(TokenRecord(name="given", role=Role.ADMIN, sha256=digest_of(given)),)
            )
        self.required = file is not None or table is not None or bool(given)

    def __repr__(self) -> str:
        return (
            f"<Tokens: {len(self._table.tokens)} of {self._file or 'the environment'}>"
            if self.required
            else "<Tokens: none>"
        )

    def find(self, token: str) -> TokenRecord | None:
        """None: it is unknown or over. The time that this takes tells nothing about the tokens."""
        if self._file is not None and clock.monotonic() - self._looked >= LOOK_S:
            self._follow(self._file)
        record = self._found(token)
        if record is None and self._file is not None and self._follow(self._file):
            return self._found(token)
        return record

    def role_of(self, token: str) -> Role | None:
        """As `find`."""
        record = self.find(token)
        return record.role if record is not None else None

    def _found(self, token: str) -> TokenRecord | None:
        given, now = digest_of(token), clock.wall_time()
        found = None
        for each in self._table.tokens:
            if hmac.compare_digest(each.sha256, given) and not each.is_over(now):
                found = each
        return found

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


FOLDER, TABLE, LOCK = "tokens", "table.json", "lock"
GIVEN = "given"  # the name of the token in TRIREME_TOKEN
KEEP_S = 60.0  # so long a token is still taken after it was rotated: members read the new one within seconds


class TokenFile:
    """A table on disk, changed by one process at a time; whoever reads it sees it whole. Raises
    InvalidArgument if it cannot be read or written."""

    def __init__(self, table: Path) -> None:
        self.table = table

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.table}>"

    def records(self) -> list[TokenRecord]:
        """Without those that are over."""
        now = clock.wall_time()
        found = read_table(self.table).tokens if self.table.exists() else ()
        return [each for each in found if not each.is_over(now)]

    def create(self, name: str, role: Role, valid_s: float | None = None) -> str:
        """A new token, for `valid_s` seconds (None: for ever). Raises Conflict if the name is taken."""
        with self._locked():
            records = self.records()
            if any(each.name == name for each in records):
                raise Conflict(
                    f"there is a token {name} already", hint="give another name, or `trireme token rotate` it"
                )
            token = new_token(role)
            self._write([*records, _record(name, role, token, valid_s)])
        return token

    def rotate(self, name: str, keep_s: float = KEEP_S) -> str:
        """A new token of the same role in the place of another one, which is taken for `keep_s` seconds more.
        Raises NotFound."""
        with self._locked():
            records = self.records()
            old = _named(records, name)
            records.remove(old)
            token = new_token(old.role)
            if keep_s > 0:
                until = rfc3339(clock.wall_time() + keep_s)
                records.append(old.with_fields(expire_time=min(until, old.expire_time or until)))
            self._write([*records, _record(name, old.role, token, _valid_s(old))])
            self._hand_out(old, token)
        return token

    def revoke(self, name: str) -> TokenRecord:
        """The token, and those that it replaced, are refused from now on. Raises NotFound."""
        with self._locked():
            records = self.records()
            found = _named(records, name)
            self._write([each for each in records if each.name != name])
        return found

    def _hand_out(self, old: TokenRecord, token: str) -> None:
        """Called when services take the new token, before they stop to take the old one."""

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with _explained(self.table):
            self._make_folder(self.table.parent)
            lock = private_files.open_private(self.table.with_name(LOCK), "a+")
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make_folder(self, folder: Path) -> None:
        private_files.make_missing(folder)

    def _write(self, records: list[TokenRecord]) -> None:
        if len(records) > MAX_TOKENS:
            raise Conflict(f"{self.table} would have more than {MAX_TOKENS} tokens", hint="revoke some")
        write_private(self.table, TokenTable(tokens=tuple(records)).model_dump_json(indent=1))


class TokenFolder(TokenFile):
    """As above, with the tokens of the three roles in files beside the table."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of the run or the cluster."""
        super().__init__(folder / FOLDER / TABLE)

    def _make_folder(self, folder: Path) -> None:
        private_files.make_folder(folder)

    def file(self, role: Role) -> Path:
        """Holds the token of that role."""
        return self.table.with_name(role.value)

    def token(self, role: Role) -> str:
        """Raises InvalidArgument if there is none, or others can read it."""
        return private_text(self.file(role)).strip()

    def prepare(self, given: str = "") -> None:
        """Make what is missing. `given` is one more token of an admin, instead of the one of the start
        before."""
        with self._locked():
            records = [each for each in self.records() if each.name != GIVEN]
            for role in Role:
                if not self._is_usable(role, records):
                    token = new_token(role)
                    write_private(self.file(role), f"{token}\n")
                    records = [each for each in records if each.name != role]
                    records.append(_record(role, role, token, None))
            if given:
                records.append(_record(GIVEN, Role.ADMIN, given, None))
            self._write(records)

    def adopt(self, role: Role, token: str) -> None:
        """`token` is that of the role from now on, beside what the table has."""
        with self._locked():
            records = self.records()
            if not any(each.sha256 == digest_of(token) for each in records):
                kept = [each for each in records if each.name != role]
                self._write([*kept, _record(role, role, token, None)])

    def _is_usable(self, role: Role, records: list[TokenRecord]) -> bool:
        try:
            digest = digest_of(self.token(role))
        except InvalidArgument:
            return False
        return any(
            (each.name, each.role, each.sha256, each.expire_time) == (role, role, digest, "")
            for each in records
        )

    def create(self, name: str, role: Role, valid_s: float | None = None) -> str:
        if name == GIVEN:
            raise Conflict(f"{GIVEN} is the name of the token in TRIREME_TOKEN", hint="give another name")
        return super().create(name, role, valid_s)

    def environment(self) -> dict[str, str]:
        """Of members: where their token and the table are. Paths, so that a new token reaches them while they
        run."""
        return {"TRIREME_TOKEN_FILE": str(self.file(Role.MEMBER)), "TRIREME_TOKENS_FILE": str(self.table)}

    def revoke(self, name: str) -> TokenRecord:
        """Raises Conflict for those of the roles: members and commands here use them."""
        if name in set(Role):
            msg = f"the token {name} is what members and commands of this machine use"
            raise Conflict(msg, hint=f"`trireme token rotate {name}` replaces it")
        return super().revoke(name)

    def _hand_out(self, old: TokenRecord, token: str) -> None:
        if old.name in set(Role):
            write_private(self.file(old.role), f"{token}\n")


def admin_token(folder: Path) -> str:
    """Of a run or a cluster in that folder; "": it has none, or it is not ours to read."""
    try:
        return TokenFolder(folder).token(Role.ADMIN)
    except InvalidArgument:
        return ""


def write_private(path: Path, text: str) -> None:
    """The file appears complete, and nobody but its owner can ever read it. Raises InvalidArgument."""
    with _explained(path):
        private_files.replace(path, text.encode())


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidArgument(f"the tokens in {path} cannot be written: {error.strerror}") from error


def _record(name: str, role: Role, token: str, valid_s: float | None) -> TokenRecord:
    now = clock.wall_time()
    expire_time = "" if valid_s is None else rfc3339(now + valid_s)
    try:
        return TokenRecord(
            name=name, role=role, sha256=digest_of(token), create_time=rfc3339(now), expire_time=expire_time
        )
    except ValidationError as error:
        msg = (
            f"{name[:80]!r} is no name of a token: use up to 64 lower-case letters, digits, dots and hyphens"
        )
        raise InvalidArgument(msg) from error


def _valid_s(record: TokenRecord) -> float | None:
    """For how long it was made."""
    if not record.expire_time:
        return None
    return clock.seconds_between(record.create_time, record.expire_time)


def _named(records: list[TokenRecord], name: str) -> TokenRecord:
    """The newest of that name."""
    found = [each for each in records if each.name == name]
    if not found:
        raise NotFound(f"there is no token {name}", hint="`trireme token list` shows them")
    return found[-1]

"""The tokens of a run or a cluster on this machine, and what changes a table of tokens.

FOLDER/tokens/{table.json, admin, member, viewer, lock}: the table that services read, a token of each role, in files for their owner
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from trireme_shared.platform.runtime import clock
from trireme_shared.platform.security import private_files
from trireme_shared.platform.security.tokens import (
    MAX_TOKENS,
    Role,
    TokenRecord,
    TokenTable,
    digest_of,
    new_token,
    private_text,
    read_table,
)
from trireme_shared.protocol.errors import Conflict, InvalidArgument, NotFound
from trireme_shared.protocol.times import rfc3339

FOLDER, TABLE, LOCK = "tokens", "table.json", "lock"
GIVEN = "given"  # the name of the token in TRIREME_TOKEN
KEEP_S = 60.0  # so long a token is still taken after it was rotated: members read the new one within seconds


class TokenFile:
    """A table on disk, changed by one process at a time; whoever reads it sees it whole. Raises InvalidArgument if it cannot be
    read or written."""

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
        """A new token of the same role in the place of another one, which is taken for `keep_s` seconds more. Raises NotFound."""
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
        """Make what is missing. `given` is one more token of an admin, instead of the one of the start before."""
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
            (each.name, each.role, each.sha256, each.expire_time) == (role, role, digest, "") for each in records
        )

    def create(self, name: str, role: Role, valid_s: float | None = None) -> str:
        if name == GIVEN:
            raise Conflict(f"{GIVEN} is the name of the token in TRIREME_TOKEN", hint="give another name")
        return super().create(name, role, valid_s)

    def environment(self) -> dict[str, str]:
        """Of members: where their token and the table are. Paths, so that a new token reaches them while they run."""
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
        msg = f"{name[:80]!r} is no name of a token: use up to 64 lower-case letters, digits, dots and hyphens"
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

"""The tokens of a run: who can read them, rotation while services and members go on, commands at the same
time."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trireme_shared.platform.runtime import clock
from trireme_shared.platform.security.tokens import (
    GIVEN,
    KEEP_S,
    LOOK_S,
    OwnToken,
    Role,
    TokenFile,
    TokenFolder,
    Tokens,
    admin_token,
)
from trireme_shared.protocol.errors import Conflict, InvalidArgument, NotFound


@pytest.fixture
def folder(tmp_path: Path) -> TokenFolder:
    made = TokenFolder(tmp_path / "run")
    made.prepare()
    return made


class Clocks:
    def __init__(self) -> None:
        self.seconds, self.time = 100.0, clock.wall_time()

    def go_on(self, seconds: float) -> None:
        self.seconds += seconds
        self.time += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    made = Clocks()
    monkeypatch.setattr(clock, "monotonic", lambda: made.seconds)
    monkeypatch.setattr(clock, "wall_time", lambda: made.time)
    return made


def test_a_first_start_makes_a_token_of_each_role_for_the_owner_alone(folder: TokenFolder) -> None:
    table = Tokens(folder.table)
    assert {role: table.role_of(folder.token(role)) for role in Role} == {role: role for role in Role}
    assert stat.S_IMODE(folder.table.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.table.parent.iterdir()} == {0o600}
    assert admin_token(folder.table.parents[1]) == folder.token(Role.ADMIN)
    assert admin_token(folder.table.parents[2]) == ""


def test_the_next_start_keeps_them_and_replaces_what_is_unusable(folder: TokenFolder) -> None:
    before = {role: folder.token(role) for role in Role}
    folder.file(Role.MEMBER).chmod(0o644)  # somebody may have read it
    folder.file(Role.VIEWER).unlink()
    folder.prepare()
    after = {role: folder.token(role) for role in Role}
    assert {role for role in Role if before[role] == after[role]} == {Role.ADMIN}
    table = Tokens(folder.table)
    assert [table.role_of(token) for token in before.values()] == [Role.ADMIN, None, None]
    assert [table.role_of(token) for token in after.values()] == [*Role]


def test_a_given_token_is_one_more_of_an_admin_until_a_start_without_it(folder: TokenFolder) -> None:
    own = folder.token(Role.ADMIN)
    for given in ("first", "second", ""):
        folder.prepare(given)
        table = Tokens(folder.table)
        assert folder.token(Role.ADMIN) == own
        found = {token: table.role_of(token) for token in ("first", "second", own)}
        assert found == {"first": None, "second": None, own: Role.ADMIN} | (
            {given: Role.ADMIN} if given else {}
        )
    with pytest.raises(Conflict):
        folder.create(GIVEN, Role.VIEWER)


def test_a_rotation_is_seen_by_services_and_members_without_a_gap(
    folder: TokenFolder, clocks: Clocks
) -> None:
    service, member = Tokens(folder.table), OwnToken(file=folder.file(Role.MEMBER))
    old = member()
    clocks.go_on(0.5)  # less than the time after which they look again
    new = folder.rotate(Role.MEMBER)
    assert (member(), service.role_of(old), service.role_of(new)) == (old, Role.MEMBER, Role.MEMBER)
    clocks.go_on(LOOK_S)
    assert member() == new == folder.token(Role.MEMBER)
    assert service.role_of(old) is Role.MEMBER
    clocks.go_on(KEEP_S)
    assert [service.role_of(token) for token in (old, new)] == [None, Role.MEMBER]
    assert [record.name for record in folder.records()] == ["admin", "viewer", "member"]


def test_a_revoked_token_is_refused_and_those_of_the_roles_are_only_rotated(
    folder: TokenFolder, clocks: Clocks
) -> None:
    service = Tokens(folder.table)
    token = folder.create("dashboard", Role.VIEWER)
    assert service.role_of(token) is Role.VIEWER
    rotated = folder.rotate("dashboard")
    assert folder.revoke("dashboard").role is Role.VIEWER
    clocks.go_on(LOOK_S)
    assert [service.role_of(each) for each in (token, rotated)] == [None, None]
    with pytest.raises(NotFound, match="there is no token dashboard"):
        folder.revoke("dashboard")
    with pytest.raises(Conflict, match="is what members and commands of this machine use"):
        folder.revoke(Role.MEMBER)


def test_a_token_for_some_time_keeps_its_length_when_it_is_rotated(
    folder: TokenFolder, clocks: Clocks
) -> None:
    service = Tokens(folder.table)
    first = folder.create("guest", Role.VIEWER, valid_s=100)
    with pytest.raises(Conflict, match="there is a token guest already"):
        folder.create("guest", Role.VIEWER)
    clocks.go_on(90)
    second = folder.rotate("guest", keep_s=1000)
    clocks.go_on(11)
    assert [service.role_of(token) for token in (first, second)] == [None, Role.VIEWER]
    clocks.go_on(90)
    assert service.role_of(second) is None
    folder.create("guest", Role.VIEWER)


@pytest.mark.parametrize("name", ["", "A", "a b", "../x", "-", "a" * 65, "é"])
def test_a_name_that_cannot_be_is_refused(folder: TokenFolder, name: str) -> None:
    before = folder.table.read_bytes()
    with pytest.raises(InvalidArgument, match="is no name of a token"):
        folder.create(name, Role.VIEWER)
    assert folder.table.read_bytes() == before


def test_changes_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "table.json")
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: tokens.create(f"n{number}", Role.VIEWER), range(24)))
    table = Tokens(tokens.table)
    assert [table.role_of(token) for token in made] == [Role.VIEWER] * 24


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(InvalidArgument, match=r"the tokens in .* cannot be written: File exists"):
        TokenFolder(tmp_path / "run").prepare()


def test_a_members_token_file_that_goes_away_leaves_what_was_read(
    folder: TokenFolder, clocks: Clocks
) -> None:
    member = OwnToken(file=folder.file(Role.MEMBER))
    before = member()
    folder.file(Role.MEMBER).unlink()
    clocks.go_on(LOOK_S)
    assert member() == before
    with pytest.raises(InvalidArgument, match="cannot be read"):
        OwnToken(file=folder.file(Role.MEMBER))

"""Tables of tokens: who is known, what a file must be, and that a change counts without a restart."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from trireme_shared.platform.runtime import clock
from trireme_shared.platform.security import tokens
from trireme_shared.platform.security.tokens import (
    Role,
    TokenRecord,
    Tokens,
    TokenTable,
    digest_of,
    new_token,
)
from trireme_shared.protocol.errors import InvalidArgument


def write(path: Path, *records: TokenRecord, mode: int = 0o600) -> Path:
    fresh = path.with_suffix(".new")
    fresh.write_bytes(TokenTable(tokens=records).to_bytes())
    fresh.chmod(mode)
    fresh.replace(path)
    return path


def record(name: str, role: Role, token: str, **more: str) -> TokenRecord:
    return TokenRecord(name=name, role=role, sha256=digest_of(token), **more)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of `Tokens`: change its only item."""
    now = [100.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    return now


def test_each_token_has_its_role_and_others_have_none(tmp_path: Path) -> None:
    given = {role: new_token(role) for role in Role}
    path = write(tmp_path / "t", *(record(role, role, token) for role, token in given.items()))
    table = Tokens(path)
    assert {role: table.role_of(token) for role, token in given.items()} == {role: role for role in Role}
    for stranger in (
        "",
        "x",
        digest_of(given[Role.ADMIN]),
        given[Role.ADMIN][:-1],
        new_token(Role.ADMIN),
        "\udcff",
    ):
        assert table.role_of(stranger) is None
    assert all(token not in path.read_text() for token in given.values()), "the file holds hashes"


def test_tokens_are_long_random_and_tell_their_role() -> None:
    made = {new_token(Role.VIEWER) for _ in range(100)}
    assert len(made) == 100
    assert all(
        token.startswith("trireme_viewer_") and len(token) == len("trireme_viewer_") + 43 for token in made
    )


@pytest.mark.parametrize(
    ("role", "includes"),
    [(Role.ADMIN, {*Role}), (Role.MEMBER, {Role.MEMBER, Role.VIEWER}), (Role.VIEWER, {Role.VIEWER})],
)
def test_a_role_includes_those_below_it(role: Role, includes: set[Role]) -> None:
    assert {needed for needed in Role if role.may(needed)} == includes


def test_a_single_token_is_an_admins_and_none_asks_nobody() -> None:
    assert Tokens(given="secret").role_of("secret") is Role.ADMIN
    assert Tokens(given="secret").required
    assert not Tokens().required
    assert Tokens().role_of("") is None


def test_a_changed_file_counts_within_a_second(tmp_path: Path, seconds: list[float]) -> None:
    path = write(tmp_path / "t", record("a", Role.ADMIN, "old"))
    table = Tokens(path)
    write(path, record("a", Role.ADMIN, "new"), record("b", Role.VIEWER, "seen"))
    assert table.role_of("old") is Role.ADMIN
    seconds[0] += tokens.LOOK_S
    assert [table.role_of(token) for token in ("old", "new", "seen")] == [None, Role.ADMIN, Role.VIEWER]


def test_a_change_for_the_worse_leaves_the_table_before_it(tmp_path: Path, seconds: list[float]) -> None:
    path = write(tmp_path / "t", record("a", Role.ADMIN, "good"))
    table = Tokens(path)
    write(path, record("a", Role.ADMIN, "public"), mode=0o644)
    seconds[0] += 1
    assert [table.role_of(token) for token in ("good", "public")] == [Role.ADMIN, None]
    path.unlink()
    seconds[0] += 1
    assert table.role_of("good") is Role.ADMIN
    write(path, record("a", Role.ADMIN, "better"))
    seconds[0] += 1
    assert [table.role_of(token) for token in ("good", "better")] == [None, Role.ADMIN]


def test_a_token_is_refused_from_its_end_on(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    ends = {"past": now - timedelta(seconds=1), "future": now + timedelta(hours=1)}
    records = [record(name, Role.ADMIN, name, expire_time=end.isoformat()) for name, end in ends.items()]
    table = Tokens(write(tmp_path / "t", *records, record("odd", Role.ADMIN, "odd", expire_time="soon")))
    assert [table.role_of(name) for name in ("past", "future", "odd")] == [None, Role.ADMIN, None]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602])
def test_a_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "t", record("a", Role.ADMIN, "x"), mode=mode)
    with pytest.raises(InvalidArgument, match=f"has mode {mode:04o}") as caught:
        Tokens(path)
    assert caught.value.hint == f"chmod 600 {path}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to a group that it is not in")
def test_a_secret_of_root_may_be_read_by_a_group_of_ours_as_kubernetes_mounts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "t", record("a", Role.ADMIN, "x"), mode=0o440)
    os.chown(path, 0, 2000)
    with pytest.raises(InvalidArgument, match="has mode 0440"):
        Tokens(path)
    monkeypatch.setattr(os, "getgroups", lambda: [0, 2000])
    assert Tokens(path).role_of("x") is Role.ADMIN
    for mode in (0o460, 0o444, 0o450):
        path.chmod(mode)
        with pytest.raises(InvalidArgument, match=f"has mode {mode:04o}"):
            Tokens(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t", record("a", Role.ADMIN, "x"))
    os.chown(path, 65534, 65534)
    with pytest.raises(InvalidArgument, match="belongs to user 65534"):
        Tokens(path)


def test_what_is_no_table_is_refused_without_showing_it(tmp_path: Path) -> None:
    path = tmp_path / "t"
    secret = "trireme_admin_plain"  # as if a token itself had been written where its hash belongs
    for content in (
        "",
        "{",
        json.dumps({"tokens": [{"name": "a", "role": "admin", "sha256": secret}]}),
        "[]",
    ):
        path.write_text(content)
        path.chmod(0o600)
        with pytest.raises(InvalidArgument, match="is no table of tokens") as caught:
            Tokens(path)
        assert secret not in str(caught.value)
    path.write_bytes(b" " * (tokens.FILE_BYTES + 1))
    with pytest.raises(InvalidArgument, match="more than 1048576 bytes"):
        Tokens(path)
    with pytest.raises(InvalidArgument, match="cannot be read: No such file"):
        Tokens(tmp_path / "missing")
    with pytest.raises(InvalidArgument, match="cannot be read: Is a directory"):
        Tokens(tmp_path)
    os.mkfifo(fifo := tmp_path / "fifo", 0o600)
    with pytest.raises(InvalidArgument, match="is no regular file"):
        Tokens(fifo)

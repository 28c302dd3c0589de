"""The secrets of a cluster of containers: made once, each kind in a folder of its own, a user's own are
kept."""

from __future__ import annotations

import stat

import pytest

from trireme.cli.security import Where, rotate_token
from trireme.containers import secrets
from trireme.containers.secrets import TokenVolumes
from trireme_shared.platform.security.access import Access
from trireme_shared.platform.security.tokens import Role, Tokens, new_token, private_text, read_table
from trireme_shared.protocol.errors import InvalidArgument


def files(root):
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


def test_each_kind_lies_in_a_folder_of_its_own_for_its_owner_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TRIREME_SECRETS", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["secrets"])
    assert secrets.main() == 0
    made = files(tmp_path)
    assert set(made) - {"members/lock"} == {
        *("etcd-root/password", "etcd/password", "grafana/password"),
        *("members/table.json", "members/member", "admin/admin", "viewer/viewer"),
        *("s3/credentials", "s3-server/config.json"),
    }
    key = made["s3/credentials"].split()[-1]
    assert key in made.pop("s3-server/config.json")
    values = [made[name].split()[-1] for name in made if name not in ("members/table.json", "members/lock")]
    assert len(set(values)) == 7
    assert all(len(value) >= 43 for value in values), "256 bits"
    for path in tmp_path.rglob("*"):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    printed = "".join(capsys.readouterr())
    assert not [value for value in values if value in printed or value in made["members/table.json"]]


def test_what_is_there_stays(tmp_path):
    secrets.prepare(tmp_path)
    before = files(tmp_path)
    secrets.prepare(tmp_path)
    assert files(tmp_path) == before


def test_a_token_of_the_users_own_counts_from_now_on(tmp_path):
    token = new_token(Role.ADMIN)
    for folder, name, text in (("admin", "admin", token), ("etcd", "password", "mine")):
        (tmp_path / folder).mkdir(mode=0o700)
        (tmp_path / folder / name).write_text(text)
        (tmp_path / folder / name).chmod(0o400)
    secrets.prepare(tmp_path)
    assert private_text(tmp_path / "admin" / "admin") == token
    assert secrets.password(tmp_path, secrets.ETCD) == "mine"
    tokens = Tokens(tmp_path / "members" / "table.json")
    assert tokens.role_of(token) is Role.ADMIN
    assert Access.of(tokens, ()) is not None


@pytest.mark.parametrize(
    ("mode", "text", "message"), [(0o644, "mine", "mode 0644"), (0o600, "\n", "password is empty")]
)
def test_a_password_that_cannot_be_used_is_named_and_not_replaced(tmp_path, mode, text, message):
    file = tmp_path / "etcd" / "password"
    file.parent.mkdir()
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(InvalidArgument, match=message):
        secrets.prepare(tmp_path)
    assert file.read_text() == text


def test_a_rotated_token_replaces_that_of_its_role(tmp_path):
    secrets.prepare(tmp_path)
    volumes = TokenVolumes(tmp_path)
    new = volumes.rotate("viewer", keep_s=0)
    assert volumes.token(Role.VIEWER) == new == (tmp_path / "viewer" / "viewer").read_text().strip()
    assert [record.name for record in read_table(volumes.table).tokens].count("viewer") == 1


def test_the_commands_about_tokens_know_the_folders(tmp_path, monkeypatch, capsys):
    secrets.prepare(tmp_path)
    monkeypatch.setenv("TRIREME_SECRETS", str(tmp_path))
    assert rotate_token(Where(), "admin", 0.0, as_json=False) == 0
    new = capsys.readouterr().out.strip()
    assert (tmp_path / "admin" / "admin").read_text().strip() == new
    assert Tokens(tmp_path / "members" / "table.json").role_of(new) is Role.ADMIN

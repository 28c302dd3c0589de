"""Certificates of `trireme certs`, and what a process makes of the files it is given."""

from __future__ import annotations

import json
import shutil
import ssl
import stat
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from trireme.cli.app import app
from trireme_shared.platform.security import authority
from trireme_shared.platform.security import tls as tls_module
from trireme_shared.platform.security.tls import Tls, client_context
from trireme_shared.protocol.errors import Conflict, InvalidArgument


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    authority.create_authority(tmp_path / "tls")
    authority.issue(tmp_path / "tls", "trireme", ("localhost", "127.0.0.1"), 30)
    return tmp_path / "tls"


def files_in(folder: Path, name: str = "trireme", **more: bool) -> Tls:
    return Tls(str(folder / "ca.pem"), str(folder / f"{name}.pem"), str(folder / f"{name}-key.pem"), **more)


def shaken_hands(server: Tls, client: Tls, host: str = "localhost") -> ssl.SSLObject:
    """Both ends in memory. Raises ssl.SSLError."""
    return shaken(server.server(), client.client(), host)


def shaken(server: ssl.SSLContext, client: ssl.SSLContext, host: str = "localhost") -> ssl.SSLObject:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    at_server = server.wrap_bio(to_server, to_client, server_side=True)
    at_client = client.wrap_bio(to_client, to_server, server_hostname=host)
    waiting = [at_client, at_server]
    for _ in range(10):
        for end in list(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                pass
    assert not waiting
    at_server.write(b"!")  # a client that lacks a certificate hears of it with the first bytes
    assert at_client.read() == b"!"
    return at_client


def test_members_with_the_files_of_one_authority_understand_each_other(folder: Path) -> None:
    tls = files_in(folder)
    assert shaken_hands(tls, tls).version() == "TLSv1.3"
    assert shaken_hands(tls, Tls(ca=tls.ca), "127.0.0.1").version() == "TLSv1.3"
    mutual = files_in(folder, mutual=True)
    assert shaken_hands(mutual, mutual)


def test_another_name_another_authority_and_a_missing_certificate_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    tls = files_in(folder)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shaken_hands(tls, tls, "elsewhere")
    other = tmp_path / "other"
    authority.create_authority(other)
    authority.issue(other, "trireme", ("localhost",), 30)
    with pytest.raises(ssl.SSLCertVerificationError):
        shaken_hands(tls, files_in(other))
    mutual = files_in(folder, mutual=True)
    with pytest.raises(ssl.SSLError, match=r"(?i)certificate"):
        shaken_hands(mutual, Tls(ca=tls.ca))
    with pytest.raises(ssl.SSLError, match=r"(?i)certificate|unknown ca"):
        shaken_hands(mutual, _mixed(tls, other))


def _mixed(tls: Tls, other: Path) -> Tls:
    """It trusts the server, and shows a certificate of another authority."""
    theirs = files_in(other)
    return Tls(tls.ca, theirs.cert, theirs.key)


def test_keys_are_for_their_owner_alone_and_certificates_end(folder: Path) -> None:
    for key in folder.glob("*-key.pem"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    made = x509.load_pem_x509_certificate((folder / "trireme.pem").read_bytes())
    assert made.not_valid_after_utc - made.not_valid_before_utc == timedelta(days=30)
    with pytest.raises(InvalidArgument, match="1 to 825 days, not 826"):
        authority.issue(folder, "x", ("localhost",), 826)
    with pytest.raises(InvalidArgument, match="'http://a' is no host name"):
        authority.issue(folder, "x", ("http://a",), 1)
    with pytest.raises(Conflict, match="has a certificate authority already"):
        authority.create_authority(folder)


def test_files_that_cannot_be_used_are_named(folder: Path, tmp_path: Path) -> None:
    tls = files_in(folder)
    cases = {
        "TRIREME_TLS_CA: /nowhere/ca.pem cannot be used": Tls(ca="/nowhere/ca.pem"),
        "TRIREME_TLS_KEY needs TRIREME_TLS_CERT": Tls(key=tls.key),
        "TRIREME_TLS_MUTUAL needs TRIREME_TLS_CERT": Tls(mutual=True),
        "TRIREME_TLS_MUTUAL needs TRIREME_TLS_CA": Tls(cert=tls.cert, key=tls.key, mutual=True),
        "TRIREME_TLS_CERT, TRIREME_TLS_KEY: .* cannot be used": Tls(cert=tls.cert, key=tls.ca),
        "TRIREME_TLS_CERT, TRIREME_TLS_KEY: .*KEY_VALUES_MISMATCH|key values mismatch": Tls(
            cert=tls.cert, key=str(folder / "ca-key.pem")
        ),
    }
    for told, given in cases.items():
        with pytest.raises(InvalidArgument, match=told):
            given.check()
    assert not Tls()
    assert Tls().server() is None
    assert Tls().client() is None


def test_commands_take_theirs_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in files_in(folder, mutual=True).environment().items():
        monkeypatch.setenv(name, value)
    assert Tls.from_environment(dict(files_in(folder).environment())) == files_in(folder)
    assert client_context() is not None


def test_trireme_certs_makes_an_authority_once_and_certificates_of_it(tmp_path: Path) -> None:
    runner, folder = CliRunner(), tmp_path / "tls"
    first = runner.invoke(app, ["certs", str(folder), "--host", "a.example", "--json"])
    assert first.exit_code == 0, first.output
    told = json.loads(first.stdout)
    assert told["TRIREME_TLS_CERT"] == str(folder / "trireme.pem")
    assert "a.example" in told["hosts"]
    before = (folder / "ca.pem").read_bytes()
    second = runner.invoke(app, ["certs", str(folder), "--name", "laptop"])
    assert second.exit_code == 0, second.output
    assert f"export TRIREME_TLS_KEY={folder / 'laptop-key.pem'}" in second.stdout
    assert (folder / "ca.pem").read_bytes() == before
    assert shaken_hands(files_in(folder, mutual=True), files_in(folder, "laptop"), "a.example")
    for wrong in (["--name", "../x"], ["--name", "ca"], ["--days", "0"], ["--host", "a/b"]):
        assert runner.invoke(app, ["certs", str(folder), *wrong]).exit_code == 2


def move(source: Path, target: Path, *names: str) -> None:
    for name in names:
        (source / name).replace(target / name)


def test_renewed_files_count_at_both_ends_and_what_was_trusted_before_does_not(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_module, "LOOK_S", 0.0)
    files = files_in(folder, mutual=True)
    server, client = files.server(), files.client()
    old = ssl.create_default_context(cafile=files.ca)
    old.load_cert_chain(files.cert, files.key)
    first = shaken(server, client).getpeercert()
    authority.issue(folder, "trireme", ("localhost",), 30)
    renewed = shaken(server, client).getpeercert()
    assert renewed["serialNumber"] != first["serialNumber"]
    assert shaken(server, old)
    authority.create_authority(tmp_path / "next")
    authority.issue(tmp_path / "next", "trireme", ("localhost",), 30)
    move(tmp_path / "next", folder, "ca.pem", "trireme.pem", "trireme-key.pem")
    assert shaken(server, client).getpeercert()["serialNumber"] != renewed["serialNumber"]
    with pytest.raises(ssl.SSLError):
        shaken(server, old)


def test_files_that_do_not_fit_together_yet_leave_those_of_before(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_module, "LOOK_S", 0.0)
    files = files_in(folder)
    server, client = files.server(), files.client()
    first = shaken(server, client).getpeercert()
    shutil.copytree(folder, tmp_path / "next")
    authority.issue(tmp_path / "next", "trireme", ("localhost",), 30)
    move(tmp_path / "next", folder, "trireme-key.pem")
    assert shaken(server, client).getpeercert() == first
    (folder / "ca.pem").rename(tmp_path / "ca.pem")
    assert shaken(server, client).getpeercert() == first
    (tmp_path / "ca.pem").rename(folder / "ca.pem")
    move(tmp_path / "next", folder, "trireme.pem")
    assert shaken(server, client).getpeercert()["serialNumber"] != first["serialNumber"]


def test_files_are_looked_at_once_a_second(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = [0.0], []
    monkeypatch.setattr(tls_module.clock, "monotonic", lambda: now[0])
    client = files_in(folder).client()
    monkeypatch.setattr(tls_module, "_state_of", lambda files: looks.append(files) or [])
    for now[0] in (0.5, 0.9, 1.1, 1.2, 2.0, 2.2):
        client.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname="localhost")
    assert len(looks) == 2


def test_trireme_certs_renews_a_certificate_for_the_same_hosts(tmp_path: Path) -> None:
    runner, folder = CliRunner(), tmp_path / "tls"
    assert runner.invoke(app, ["certs", str(folder), "--renew"]).exit_code == 2
    assert not folder.exists()
    assert (
        runner.invoke(app, ["certs", str(folder), "--host", "a.example", "--host", "10.0.0.5"]).exit_code == 0
    )
    before, key = (folder / "trireme.pem").read_bytes(), (folder / "trireme-key.pem").read_bytes()
    told = runner.invoke(app, ["certs", str(folder), "--renew", "--host", "b.example", "--json"])
    assert told.exit_code == 0, told.output
    assert {"a.example", "10.0.0.5", "b.example", "127.0.0.1"} < set(json.loads(told.stdout)["hosts"])
    assert (folder / "trireme.pem").read_bytes() != before
    assert (folder / "trireme-key.pem").read_bytes() != key
    assert shaken_hands(files_in(folder), files_in(folder), "a.example")

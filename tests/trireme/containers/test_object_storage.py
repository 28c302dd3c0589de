"""The keys of an S3 server of the project's own, and the bucket of the cluster's storage."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from tests.equipment.s3 import S3Server, forget_clients, refusal, s3
from trireme.containers.secrets import prepare_s3_keys
from trireme.containers.setup import prepare_bucket
from trireme_shared.platform.storage import files, object_store
from trireme_shared.protocol.errors import DeadlineExceeded, InvalidArgument, Unauthorized

__all__ = ["s3"]


def identity(root):
    (found,) = json.loads((root / "s3-server" / "config.json").read_text())["identities"]
    return found


def test_the_server_gets_the_keys_that_clients_have(tmp_path):
    prepare_s3_keys(tmp_path)
    before = (tmp_path / "s3" / "credentials").read_text()
    prepare_s3_keys(tmp_path)
    assert (tmp_path / "s3" / "credentials").read_text() == before, "what is there stays"
    section, key_id, key = before.split("\n")[:3]
    assert section == "[default]"
    assert identity(tmp_path)["credentials"] == [
        {"accessKey": key_id.partition(" = ")[2], "secretKey": key.partition(" = ")[2]}
    ]
    assert len(key.partition(" = ")[2]) >= 43, "256 bits"


def test_keys_of_the_users_own_reach_the_server(tmp_path):
    write(tmp_path, "[default]\naws_access_key_id = mine\naws_secret_access_key = my%key\nregion = x\n")
    prepare_s3_keys(tmp_path)
    write(tmp_path, "[default]\naws_access_key_id=mine\naws_secret_access_key=another\n")
    prepare_s3_keys(tmp_path)
    assert identity(tmp_path)["credentials"] == [{"accessKey": "mine", "secretKey": "another"}]


@pytest.mark.parametrize(
    "text", ["my-secret\n", "[other]\naws_access_key_id = my-secret\n", "[default]\nmy-secret\n"]
)
def test_credentials_that_cannot_be_read_are_named_and_not_shown(tmp_path, text):
    write(tmp_path, text)
    with pytest.raises(InvalidArgument, match="s3/credentials") as raised:
        prepare_s3_keys(tmp_path)
    assert "my-secret" not in str(raised.value) + str(raised.value.hint)


def write(root, text):
    path = root / "s3" / "credentials"
    path.parent.mkdir(exist_ok=True, mode=0o700)
    path.write_text(text)
    path.chmod(0o600)


async def test_keys_from_the_file_open_the_bucket(s3: S3Server, tmp_path, monkeypatch):
    prepare_s3_keys(tmp_path)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "s3" / "credentials"))
    forget_clients()
    signed: list[str] = []
    s3.before = lambda environ: signed.append(environ.get("HTTP_AUTHORIZATION", ""))
    await prepare_bucket("s3://made/jobs", 30)
    files.write_bytes("s3://made/jobs/a", b"x")
    assert files.names("s3://made/jobs") == ["a"]
    assert signed
    assert all("Credential=trireme/" in each for each in signed)


def test_an_empty_endpoint_means_amazon(s3: S3Server, monkeypatch):
    """As docker-compose.yml gives it where no S3 server of the project's own runs."""
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "")
    from trireme_shared.platform.storage import object_store

    forget_clients()
    filesystem = object_store.filesystem()
    filesystem.connect()
    assert filesystem.s3.meta.endpoint_url.endswith("amazonaws.com")


async def test_a_server_that_is_not_ready_is_waited_for(s3: S3Server):
    stumbles = ["503 Slow Down"] * 12
    ready = threading.Event()

    def before(_):
        if stumbles:
            return stumbles.pop(), refusal("SlowDown")
        ready.set()
        return None

    s3.before = before
    await prepare_bucket("s3://late/jobs", 60)
    assert ready.is_set()


async def test_a_server_that_never_comes_ends_the_wait_with_the_reason(s3: S3Server):
    s3.before = lambda _: ("500 Internal Server Error", refusal("InternalError"))
    with pytest.raises(DeadlineExceeded, match=r"waited 0 s for the storage: .*InternalError"):
        await prepare_bucket("s3://bucket/jobs", 0)


async def test_keys_that_are_refused_are_no_reason_to_wait(s3: S3Server):
    s3.before = lambda _: ("403 Forbidden", refusal("InvalidAccessKeyId"))
    with pytest.raises(Unauthorized, match="InvalidAccessKeyId"):
        await prepare_bucket("s3://bucket/jobs", 600)


async def test_a_bucket_is_not_made_at_amazon(s3: S3Server, monkeypatch):
    monkeypatch.setattr(object_store, "endpoint", lambda: "")
    with pytest.raises(InvalidArgument, match="no bucket 'mistyped' at Amazon"):
        await prepare_bucket("s3://mistyped/jobs", 600)
    assert not [request for request in s3.requests if request.startswith("PUT /mistyped?")]


def test_cat_and_ls_take_urls_of_the_storage(tmp_path):
    """One process of each: a file of bytes that are no text, and what fails."""
    (tmp_path / "a").write_bytes(b"\xff\x00model")
    (tmp_path / "b").write_bytes(b"")

    def command(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "trireme.containers.urls", *arguments], capture_output=True, timeout=60
        )

    assert command("cat", f"file://{tmp_path}/a").stdout == b"\xff\x00model"
    assert command("ls", f"file://{tmp_path}").stdout == b"a\nb\n"
    missing = command("cat", f"file://{tmp_path}/none")
    assert (missing.returncode, missing.stdout) == (1, b"")
    assert b"none does not exist" in missing.stderr

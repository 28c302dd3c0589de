"""`--storage`: each run has its own place, and errors are reported before anything starts."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.equipment.s3 import BUCKET, S3Server, refusal, s3
from trireme.cli import exit_codes, run
from trireme.settings import UsageError
from trireme_shared.platform.storage import files, object_store
from trireme_shared.protocol.errors import InvalidArgument, PeerError, Unauthorized

__all__ = ["s3"]


def checked(url: str) -> list[str]:
    """The messages while it waits."""
    told: list[str] = []
    asyncio.run(run.check_storage(url, told.append))
    return told


def test_without_storage_a_run_keeps_everything_in_its_folder(tmp_path):
    assert run.storage_of(None, "job", tmp_path) == str(tmp_path)


def test_each_new_run_has_a_place_of_its_own_and_goes_on_in_it(tmp_path):
    one = run.storage_of("s3://bucket/runs/", "job", tmp_path)
    other = run.storage_of("s3://bucket/runs", "job", tmp_path)
    assert one.startswith("s3://bucket/runs/job/run-")
    assert one != other
    assert run.storage_of("s3://bucket/runs", "job", tmp_path, last=one) == one
    assert run.storage_of("s3://bucket/else", "job", tmp_path, last=one) not in {one, other}
    assert run.storage_of("s3://bucket/runs", "job-2", tmp_path, last=one).startswith(
        "s3://bucket/runs/job-2/run-"
    )


def test_a_local_path_means_the_same_in_every_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run.storage_of("store", "job", tmp_path).startswith(f"{tmp_path}/store/job/run-")


def test_a_place_that_works_is_silent_and_left_without_what_a_killed_run_began(s3: S3Server):
    begun = {"Bucket": BUCKET, "Key": "runs/job/run-1/checkpoints/u/part"}
    object_store.filesystem().call_s3("create_multipart_upload", **begun)
    assert checked("s3://bucket/runs/job/run-1") == []
    assert (s3.objects(), s3.uploads()) == ([], [])


def test_temporary_files_of_a_killed_run_are_removed(tmp_path):
    (tmp_path / "checkpoints" / "u").mkdir(parents=True)
    left = tmp_path / "checkpoints" / "u" / ".pserver-0.x.safetensors.0123456789ab.tmp"
    left.touch()
    (tmp_path / "data.tmp").touch()
    assert checked(str(tmp_path)) == []
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["data.tmp"]


def test_a_bucket_that_is_missing(s3):
    with pytest.raises(UsageError, match=r"storage cannot be used: .*there is no bucket 'nowhere'") as caught:
        checked("s3://nowhere/runs")
    assert exit_codes.code_of(caught.value) == exit_codes.USAGE


def test_access_that_is_denied(s3):
    s3.before = lambda _: ("403 Forbidden", refusal("AccessDenied"))
    with pytest.raises(Unauthorized, match=r"refuses access to tester \(AccessDenied") as caught:
        checked("s3://bucket/runs")
    assert exit_codes.code_of(caught.value) == exit_codes.AUTH


def test_a_store_that_is_not_reached_is_waited_for_with_a_limit_and_told(s3, monkeypatch):
    monkeypatch.setattr(run, "REPORT_AFTER_S", 0.1)
    monkeypatch.setattr(object_store, "REQUEST_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        told: list[str] = []
        with pytest.raises(PeerError, match=f"no answer from {address} within 0.5 s") as caught:
            asyncio.run(run.check_storage("s3://bucket/runs", told.append))
    assert told[0].startswith(f"waiting for s3://bucket/runs at {address}, at most ")
    assert exit_codes.code_of(caught.value) == exit_codes.UNREACHABLE


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"storage cannot be used: .*file") as caught:
        checked(str(tmp_path / "file"))
    assert caught.value.hint == "give another --storage"


def test_an_unknown_protocol():
    with pytest.raises(InvalidArgument, match="no way to open nosuch://runs"):
        checked("nosuch://runs")


def test_a_place_in_memory_works():
    assert checked("memory://stores/runs") == []
    files.remove_tree("memory://stores")

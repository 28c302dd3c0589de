"""Files on S3, by real HTTP: whole objects or none, nothing left of what failed, errors that say what to
do."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import time
from array import array

import pytest

from tests.equipment.s3 import BUCKET, S3Server, forget_clients, refusal, s3
from trireme_shared.platform.storage import files, object_store
from trireme_shared.protocol.errors import InvalidArgument

__all__ = ["s3"]

PART = 5 << 20


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """The smallest that S3 allows, so that uploads of several parts are quick."""
    monkeypatch.setattr(object_store, "PART_BYTES", PART)


def write_parts(url: str, count: int) -> None:
    with files.write_atomic(url) as file:
        for _ in range(count):
            file.write(memoryview(bytes(PART)))


def on(method: str, query: str, status: str, code: str):
    """Every such request is answered with this error."""

    def before(environ):
        fits = environ["REQUEST_METHOD"] == method and query in environ["QUERY_STRING"]
        return (status, refusal(code)) if fits else None

    return before


# ------------------------------------------------------------ whole or not there


def test_an_object_appears_when_it_is_whole(s3: S3Server):
    url = files.join(s3.url, "job", "part")
    with files.write_atomic(url) as file:
        for _ in range(3):
            file.write(bytes(PART))
            assert not files.exists(url)
            assert [object_store.marked_by(key) for key in s3.objects()] == ["job/part"]
        assert s3.uploads() == ["job/part"]
    assert files.size(url) == 3 * PART
    assert (s3.objects(), s3.uploads()) == (["job/part"], [])


def test_an_object_smaller_than_a_part_is_one_request(s3: S3Server):
    for size in (0, PART - 1):
        s3.requests.clear()
        with files.write_atomic(files.join(s3.url, "part")) as file:
            file.write(memoryview(b"x" * size))
        assert [request.split("?")[0] for request in s3.requests] == ["PUT /bucket/part"]
        assert files.read_bytes(files.join(s3.url, "part")) == b"x" * size


def test_pieces_of_any_size_and_form_become_the_object(s3: S3Server):
    """Also those that are larger than a part, and of other elements than bytes."""
    numbers = array("d", range(PART // 8 + 7))
    content = b"".join((b"abc", numbers.tobytes(), bytes(PART - 3), b"end" * PART))
    url = files.join(s3.url, "part")
    with files.write_atomic(url) as file:
        for piece in (b"abc", b"", memoryview(numbers), bytearray(PART - 3), b"end" * PART):
            file.write(piece)
        assert file.tell() == len(content)
    assert files.read_bytes(url) == content


def test_until_then_readers_see_the_old_object(s3: S3Server):
    url = files.join(s3.url, "part")
    files.write_bytes(url, b"old")
    with files.write_atomic(url) as file:
        file.write(bytes(2 * PART))
        assert files.read_bytes(url) == b"old"
    assert files.size(url) == 2 * PART


def test_a_writer_that_fails_leaves_no_object_and_no_upload(s3: S3Server):
    with (
        pytest.raises(RuntimeError, match="half way"),
        files.write_atomic(files.join(s3.url, "part")) as file,
    ):
        file.write(bytes(2 * PART))
        raise RuntimeError("half way")
    del file
    gc.collect()
    assert (s3.objects(), s3.uploads()) == ([], [])


@pytest.mark.parametrize(
    "broken", [("POST", "uploads"), ("PUT", "partNumber=1"), ("PUT", "partNumber=2"), ("POST", "uploadId=")]
)
def test_a_part_or_an_end_that_is_refused_leaves_no_object_and_no_upload(s3: S3Server, broken):
    s3.before = on(*broken, "403 Forbidden", "AccessDenied")
    with pytest.raises(PermissionError, match="refuses access to tester"):
        write_parts(files.join(s3.url, "part"), 3)
    assert (s3.objects(), s3.uploads()) == ([], [])


def test_a_marker_that_is_refused_leaves_nothing_for_the_garbage_collector_to_finish(s3: S3Server):
    def refuse_markers(environ):
        marker = environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].endswith(".tmp")
        return ("403 Forbidden", refusal("AccessDenied")) if marker else None

    s3.before = refuse_markers
    with pytest.raises(PermissionError, match="refuses access to tester"):
        write_parts(files.join(s3.url, "part"), 3)
    s3.before = lambda _: None
    gc.collect()
    assert (s3.objects(), s3.uploads()) == ([], [])


def test_an_upload_is_marked_before_it_begins(s3: S3Server):
    """A writer may be killed at any moment, and MinIO lists uploads by the names of their objects alone."""
    marked = []

    def look(environ):
        if environ["REQUEST_METHOD"] == "POST" and "uploads" in environ["QUERY_STRING"]:
            marked.append([object_store.marked_by(key) for key in s3.objects()])

    s3.before = look
    write_parts(files.join(s3.url, "job", "part"), 1)
    assert marked == [["job/part"]]


def test_a_marker_that_cannot_be_deleted_does_not_harm_the_object(s3: S3Server):
    s3.before = on("DELETE", "", "403 Forbidden", "AccessDenied")
    write_parts(files.join(s3.url, "job", "part"), 1)
    s3.before = lambda _: None
    assert files.size(files.join(s3.url, "job", "part")) == PART
    assert files.sweep(files.join(s3.url, "job")) == 0
    assert (s3.objects(), s3.uploads()) == (["job/part"], [])


def test_a_server_that_stumbles_is_asked_again(s3: S3Server):
    stumbles = ["PUT"]
    s3.before = lambda environ: (
        ("503 Slow Down", refusal("SlowDown"))
        if stumbles and environ["REQUEST_METHOD"] == stumbles.pop()
        else None
    )
    files.write_bytes(files.join(s3.url, "a"), b"x")
    assert (s3.objects(), stumbles) == (["a"], [])


# ------------------------------------------------------------ lists and deletes


def test_names_are_fresh_each_time(s3: S3Server):
    for name in ("b", "a", "deep/er"):
        files.write_bytes(files.join(s3.url, "job", name), b"")
    assert files.names(files.join(s3.url, "job")) == ["a", "b", "deep"]
    files.write_bytes(files.join(s3.url, "job", "c"), b"")
    assert files.names(files.join(s3.url, "job")) == ["a", "b", "c", "deep"]
    assert files.names(files.join(s3.url, "none")) == []


def test_a_tree_is_removed_with_its_unfinished_uploads_and_nothing_beside_it(s3: S3Server):
    begin = {"Bucket": BUCKET, "Key": "job/1/part"}
    for name in ("job/1/a", "job/1/deep/b", "job/10/a"):
        files.write_bytes(files.join(s3.url, name), b"x")
    filesystem = object_store.filesystem()
    filesystem.call_s3("create_multipart_upload", **begin)
    filesystem.call_s3("create_multipart_upload", **begin | {"Key": "job/10/part"})
    files.remove_tree(files.join(s3.url, "job", "1"))
    assert (s3.objects(), s3.uploads()) == (["job/10/a"], ["job/10/part"])
    files.remove_tree(files.join(s3.url, "job", "1"))


def test_more_objects_than_one_request_may_name_are_all_removed(s3: S3Server, monkeypatch):
    monkeypatch.setattr(object_store, "AT_ONCE", 2)
    for number in range(5):
        files.write_bytes(files.join(s3.url, "job", str(number)), b"")
    files.remove_tree(files.join(s3.url, "job"))
    assert s3.objects() == []


def kill_a_writer_of(url: str) -> None:
    """A process that begins an upload, and is killed by SIGKILL."""
    code = (
        "import os, signal\nfrom trireme_shared.platform.storage import files, object_store\n"
        f"with files.write_atomic({url!r}) as file:\n"
        "    file.write(bytes(object_store.PART_BYTES))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == -9


@pytest.mark.parametrize("as_minio", [False, True], ids=["listed by folder", "listed by key, as MinIO does"])
def test_the_upload_of_a_killed_writer_is_swept(s3: S3Server, as_minio):
    s3.as_minio = as_minio
    files.write_bytes(files.join(s3.url, "job", "whole"), b"x")
    kill_a_writer_of(files.join(s3.url, "job", "checkpoints", "u", "part.0.safetensors"))
    assert s3.uploads() == ["job/checkpoints/u/part.0.safetensors"]
    assert files.sweep(files.join(s3.url, "other")) == 0
    assert files.sweep(files.join(s3.url, "job")) == 1
    assert (s3.objects(), s3.uploads()) == (["job/whole"], [])
    assert files.sweep(files.join(s3.url, "job")) == 0


@pytest.mark.parametrize("as_minio", [False, True], ids=["listed by folder", "listed by key, as MinIO does"])
def test_a_tree_is_removed_with_the_upload_of_a_killed_writer(s3: S3Server, as_minio):
    s3.as_minio = as_minio
    for folder in ("1", "10"):
        kill_a_writer_of(files.join(s3.url, "job", folder, "part"))
    files.remove_tree(files.join(s3.url, "job", "1"))
    assert s3.uploads() == ["job/10/part"]
    assert [object_store.marked_by(key) for key in s3.objects()] == ["job/10/part"]


# ------------------------------------------------------------ what is wrong, and what to do


def test_a_place_that_can_be_written_passes_and_nothing_is_left(s3: S3Server):
    files.check_writable(files.join(s3.url, "runs"))
    assert s3.objects() == []


@pytest.mark.parametrize("work", [files.check_writable, files.names, files.remove_tree, files.sweep])
def test_a_bucket_that_is_missing(s3: S3Server, work):
    with pytest.raises(
        FileNotFoundError, match=r"there is no bucket .nowhere. at http://127\.0\.0\.1:.*create it, or"
    ):
        work("s3://nowhere/runs")
    assert not [request for request in s3.requests if request == "PUT /nowhere?"], "nobody creates a bucket"


@pytest.mark.parametrize("work", [files.check_writable, files.names, files.read_bytes, files.size])
def test_access_that_is_denied(s3: S3Server, work):
    s3.enforce_permissions()
    with pytest.raises(
        PermissionError, match=r"http://127.0.0.1:\d+ refuses access to tester \(.*check key, secret"
    ):
        work(files.join(s3.url, "runs"))


def test_an_object_that_is_missing_is_a_missing_file(s3: S3Server):
    with pytest.raises(FileNotFoundError):
        files.read_bytes(files.join(s3.url, "none"))


def test_no_credentials(s3: S3Server, monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    forget_clients()
    with pytest.raises(PermissionError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        files.check_writable(s3.url)
    for place in ("train.npy", "train-*.npy"):
        with pytest.raises(PermissionError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
            files.expand(files.join(s3.url, place))


def test_an_endpoint_that_refuses_connections(s3: S3Server, monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    before = time.monotonic()
    with pytest.raises(
        ConnectionError,
        match=rf"no answer from http://127.0.0.1:{port} in 3 attempts .* see AWS_ENDPOINT_URL",
    ):
        files.check_writable(s3.url)
    assert time.monotonic() - before < 20


def test_an_endpoint_that_never_answers_is_waited_for_with_a_limit(s3: S3Server, monkeypatch):
    monkeypatch.setattr(object_store, "REQUEST_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ConnectionError, match=r"no answer from http://127\.0\.0\.1:\d+ within 0\.5 s"):
            files.check_writable(s3.url)


def test_without_the_extra_the_message_says_what_to_install():
    """In a process of its own, where s3fs cannot be imported."""
    code = (
        "import sys\nsys.modules['s3fs'] = None\nfrom trireme_shared.platform.storage import files\n"
        "try:\n    files.names('s3://bucket/x')\n"
        "except Exception as error:\n    print(type(error).__name__, error, error.hint, sep='|')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    kind, message, hint = done.stdout.strip().split("|")
    assert (kind, hint) == (InvalidArgument.__name__, "pip install 'trireme[s3]'")
    assert message == "s3:// needs s3fs, which is not installed"

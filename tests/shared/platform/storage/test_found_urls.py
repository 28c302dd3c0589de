"""The URL of a file that was found by a URL or a glob: it opens the same way, by every protocol that fsspec
knows."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from fsspec.core import strip_protocol
from fsspec.registry import get_filesystem_class, known_implementations

from master_service.storage.job_storage import count_records
from trainer_agent.data import open_dataset
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import DatasetError, InvalidArgument, StorageUnreachable
from trireme_shared.protocol.records.datasets import Csv, JsonLines, Npy, Parquet

CONTENT = b"a,b\n" + b"".join(b"%d,%d\n" % (n, n * n) for n in range(50))

# what fsspec calls the path of URLs whose package is not installed here
ELSEWHERE = [
    ("abfs://container@account.dfs.core.windows.net/data/*.csv", "container/data/*.csv"),
    ("az://container/data/*.csv", "container/data/*.csv"),
    ("gs://bucket/data/*.csv", "bucket/data/*.csv"),
    ("sftp://user@host:22/data/*.csv", "/data/*.csv"),
    ("smb://user@server/share/*.csv", "/share/*.csv"),
    ("webdav://host/data/*.csv", "data/*.csv"),
    ("hf://datasets/owner/name@main/*.csv", "datasets/owner/name@main/*.csv"),
]


def importable() -> list[str]:
    """Protocols whose classes can be imported. The others need a package of their own; `generic` only tells
    which other one to ask, and a URL of `gist` names files, never a pattern."""
    found = []
    for protocol in sorted(set(known_implementations) - {"file", "local", "generic", "gist"}):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                get_filesystem_class(protocol)
        except ImportError:
            continue
        found.append(protocol)
    return found


@pytest.mark.parametrize("authority", ["host", "user:secret@host:8020"])
def test_a_found_file_has_the_host_and_all_else_of_the_url_that_found_it(authority):
    known = importable()
    assert {"ftp", "github", "hdfs", "http", "https", "memory", "s3", "webhdfs", "zip"} <= set(known)
    for protocol in known:
        url = f"{protocol}://{authority}/data/*.csv"
        stripped = strip_protocol(url)
        one = files.with_path(url, stripped, stripped.replace("*.csv", "b.csv"))
        assert one == f"{protocol}://{authority}/data/b.csv"


@pytest.mark.parametrize(("url", "stripped"), ELSEWHERE)
def test_protocols_whose_package_is_not_installed(url, stripped):
    assert files.with_path(url, stripped, stripped.replace("*", "b")) == url.replace("*", "b")


def test_links_of_a_chain_stay_and_a_path_from_elsewhere_is_refused():
    chained = "simplecache::ftp://user@host/data/*.csv"
    assert files.with_path(chained, "/data/*.csv", "/data/b.csv") == "simplecache::ftp://user@host/data/b.csv"
    assert files.with_path("zip://*.csv::s3://b/a.zip", "*.csv", "b.csv") == "zip://b.csv::s3://b/a.zip"
    with pytest.raises(InvalidArgument, match=r"gives other/b.csv, which is not below it"):
        files.with_path("az://container@account/*.csv", "container/*.csv", "other/b.csv")


class Handler(BaseHTTPRequestHandler):
    """Files with ranges, a page that lists them, and an address that fails."""

    served: dict[str, bytes] = {}  # noqa: RUF012

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0].lstrip("/")
        if path.startswith("broken"):
            self.send_error(503)
            return
        if path == "":
            content = "".join(f'<a href="{name}">{name}</a>' for name in self.served).encode()
        elif path in self.served:
            content = self.served[path]
        else:
            self.send_error(404)
            return
        whole, status = len(content), 200
        wanted = self.headers.get("Range", "")
        if wanted.startswith("bytes="):
            first, _, last = wanted[6:].partition("-")
            content, status = content[int(first) : int(last or whole - 1) + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(content) - 1}/{whole}")
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch) -> Iterator[str]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    Handler.served = {"a.csv": CONTENT, "b.csv": CONTENT}
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{serving.server_address[1]}"
        finally:
            serving.shutdown()
            thread.join()


@pytest.mark.parametrize("name", ["a.csv", "a.csv?token=1", "*.csv"])
def test_a_dataset_is_counted_and_read_by_http(server, name):
    dataset = Csv(f"{server}/{name}")
    table = count_records(dataset, 20)
    assert table.records == (100 if name == "*.csv" else 50)
    reader = open_dataset(dataset)
    for task in range(table.tasks):
        place = table.locate(task)
        read = reader.read(place.file, place.first, place.count, place.offset).columns(np.arange(place.count))
        assert read["b"].tolist() == [n * n for n in range(place.first, place.first + place.count)]


def test_a_server_that_fails_is_no_missing_file(server):
    with pytest.raises(
        StorageUnreachable, match=r"broken.csv cannot be read now: its storage does not answer"
    ):
        count_records(Csv(f"{server}/broken.csv"), 20)
    with pytest.raises(DatasetError, match=r"none.csv does not exist"):
        count_records(Csv(f"{server}/none.csv"), 20)


@pytest.mark.parametrize("kind", [Csv, JsonLines, Npy, Parquet])
def test_a_host_that_nobody_answers_for_is_no_missing_file(kind):
    with pytest.raises(StorageUnreachable, match="its storage does not answer"):
        count_records(kind("http://127.0.0.1:1/x"), 20)

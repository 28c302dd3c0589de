"""A real S3 over HTTP for tests (moto's server): `from tests.equipment.s3 import s3` and take it as a
fixture."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import pytest
from moto import settings
from moto.core.responses import ActionAuthenticatorMixin
from moto.moto_api._internal import moto_api_backend
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, make_server

from trireme_shared.platform.storage import object_store

BUCKET = "bucket"
NO_UPLOADS = b"""<?xml version="1.0" encoding="UTF-8"?>
<ListMultipartUploadsResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Bucket>bucket</Bucket>
<IsTruncated>false</IsTruncated></ListMultipartUploadsResult>"""
Environ = dict[str, Any]


@dataclass
class S3Server:
    """`url` is a bucket's. `before` sees each request first: an answer (status line, body) is sent in place
    of moto's. `as_minio`: unfinished uploads are listed by the exact key of their object alone, so a folder
    has none."""

    server: BaseWSGIServer
    before: Callable[[Environ], tuple[str, bytes] | None] = lambda _: None
    requests: list[str] = field(default_factory=list)
    url: str = f"s3://{BUCKET}"
    as_minio: bool = False

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to find it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def objects(self) -> list[str]:
        """Every key of the bucket."""
        found = object_store.filesystem().call_s3("list_objects_v2", Bucket=BUCKET)
        return [item["Key"] for item in found.get("Contents", ())]

    def uploads(self) -> list[str]:
        """Keys of the uploads that are neither completed nor aborted."""
        as_minio, self.as_minio = self.as_minio, False
        found = object_store.filesystem().call_s3("list_multipart_uploads", Bucket=BUCKET)
        self.as_minio = as_minio
        return [upload["Key"] for upload in found.get("Uploads", ())]

    def hidden(self, environ: Environ) -> tuple[str, bytes] | None:
        """What MinIO answers to whoever lists the uploads of a folder."""
        asked = parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
        folder = asked.get("prefix", [""])[0]
        if not self.as_minio or "uploads" not in asked or environ["REQUEST_METHOD"] != "GET":
            return None
        return None if folder and not folder.endswith("/") else ("200 OK", NO_UPLOADS)

    def enforce_permissions(self) -> None:
        """From now on nobody may do anything."""
        allow(0)


def serve() -> S3Server:
    moto = DomainDispatcherApplication(create_backend_app)

    def application(environ: Environ, start_response: Any) -> Any:
        found.requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}")
        answer = found.before(environ) or found.hidden(environ)
        if answer is None:
            return moto(environ, start_response)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(
            answer[0], [("Content-Type", "application/xml"), ("Content-Length", str(len(answer[1])))]
        )
        return [answer[1]]

    found = S3Server(make_server("127.0.0.1", 0, application, threaded=True))
    threading.Thread(target=found.server.serve_forever, args=(0.02,), name="s3", daemon=True).start()
    return found


def forget_clients() -> None:
    """They keep the credentials they were made with."""
    type(object_store.filesystem()).clear_instance_cache()


def allow(requests: float) -> None:
    """Only so many more requests without a permission; moto's state is the process's, whatever server is
    asked."""
    settings.INITIAL_NO_AUTH_ACTION_COUNT = requests
    ActionAuthenticatorMixin.request_count = 0


def refusal(code: str, message: str = "so the test wants it") -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """An empty bucket of its own, and AWS_* variables that lead to it."""
    found = serve()
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    object_store.filesystem().call_s3("create_bucket", Bucket=BUCKET)
    found.requests.clear()
    yield found
    found.before = lambda _: None
    allow(float("inf"))
    moto_api_backend.reset()
    found.server.shutdown()
    found.server.server_close()
    forget_clients()

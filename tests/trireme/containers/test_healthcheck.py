"""docker/healthcheck.py asks its own container, whatever the environment says of proxies and services."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trireme_shared.platform.security import authority
from trireme_shared.platform.security.tls import Tls

SCRIPT = Path(__file__).parents[3] / "docker" / "healthcheck.py"


class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = self.path == "/readyz"
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(b"ready")

    def log_message(self, *_: object) -> None:
        return


class OnIpv6(http.server.HTTPServer):
    address_family = socket.AF_INET6


@contextmanager
def serving(
    host: str = "127.0.0.1",
    kind: type[http.server.HTTPServer] = http.server.HTTPServer,
    tls: Tls | None = None,
) -> Iterator[str]:
    """Its port."""
    with kind((host, 0), Ready) as server:
        if tls is not None and (context := tls.server()) is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield str(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


def check(**variables: str) -> tuple[int, str]:
    """The exit code, and what it prints."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("TRIREME_")}
    done = subprocess.run(
        [sys.executable, "-I", str(SCRIPT)],
        env={**own, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_it_asks_no_proxy():
    with socket.create_server(("127.0.0.1", 0)) as deaf, serving() as port:
        proxy = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
        assert check(TRIREME_PORT=port, **dict.fromkeys(names, proxy)) == (0, "ready\n")
        deaf.setblocking(False)
        with pytest.raises(BlockingIOError):
            deaf.accept()


def test_a_service_link_is_no_port(tmp_path):
    link = "tcp://10.9.8.7:8470"
    assert check(TRIREME_PORT=link, TRIREME_SERVICE_HOST="10.9.8.7")[0] == 0
    missing = tmp_path / "ready"
    assert check(TRIREME_PORT=link, TRIREME_READY_FILE=str(missing)) == (
        1,
        f"it has not made {missing} yet\n",
    )


@pytest.mark.parametrize("host", ["::1", "::"])
def test_a_service_that_listens_on_ipv6_alone_is_found(host):
    with serving("::1", OnIpv6) as port:
        assert check(TRIREME_PORT=port, TRIREME_HOST=host) == (0, "ready\n")
        assert check(TRIREME_PORT=port)[0] == 1


def test_a_gateway_without_a_certificate_passes_on_those_of_masters(tmp_path):
    authority.create_authority(tmp_path)
    authority.issue(tmp_path, "master", ("masters.test",), 1)
    ca, cert, key = (str(tmp_path / name) for name in ("ca.pem", "master.pem", "master-key.pem"))
    with serving(tls=Tls(ca, cert, key)) as port:
        assert check(TRIREME_PORT=port, TRIREME_TLS_CA=ca, TRIREME_MASTERS="masters.test:1") == (0, "ready\n")
        assert check(TRIREME_PORT=port, TRIREME_TLS_CERT=cert, TRIREME_TLS_KEY=key, TRIREME_TLS_CA=ca)[0] == 0
        assert check(TRIREME_PORT=port, TRIREME_TLS_CA=ca)[0] == 1

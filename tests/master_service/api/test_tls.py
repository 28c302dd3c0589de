"""The master's REST API over TLS."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from master_service.api.app import make_app
from master_service.api.server import Server
from tests.equipment.uvicorn_server import served
from tests.equipment.waiting import until
from tests.master_service.cluster import MasterCluster, running, spec_of
from trireme.client import ONLY_JOB, AsyncClient
from trireme.view.job_address import client_of
from trireme_shared.platform.security import authority
from trireme_shared.platform.security.tls import Tls
from trireme_shared.protocol.errors import PeerError


async def test_clients_that_trust_its_authority_and_have_a_certificate_get_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority.create_authority(tmp_path / "tls")
    authority.issue(tmp_path / "tls", "trireme", ("127.0.0.1",), 1)
    ca, cert, key = (str(tmp_path / "tls" / name) for name in ("ca.pem", "trireme.pem", "trireme-key.pem"))
    tls = Tls(ca, cert, key, mutual=True)
    failed: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    async with running(MasterCluster(spec_of()), "t1") as master:
        server = Server(make_app(master), tls=tls.server())
        async with served(server) as port:
            await _asked(port, tls, monkeypatch)
            await until(lambda: not server.server_state.connections, "the end of all connections", 10)
    assert not failed  # nobody's going is an error


async def _asked(port: int, tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"https://127.0.0.1:{port}"
    async with client_of(url, timeout_s=2) as stranger:
        with pytest.raises(PeerError, match="certificate verify failed"):
            await stranger.get_job(ONLY_JOB)
    for context in (Tls(ca=tls.ca).client(), ssl.create_default_context()):
        assert context is not None
        async with httpx.AsyncClient(verify=context) as http:
            with pytest.raises(httpx.TransportError):
                await http.get(f"{url}/healthz")
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.TransportError):
            await http.get(f"http://127.0.0.1:{port}/healthz")
    async with AsyncClient(url, token="", timeout_s=1) as unknown:
        with pytest.raises(PeerError, match="certificate verify failed"):
            await unknown.get_version()
    async with AsyncClient(url, token="", tls=tls) as typed:
        assert (await typed.get_version()).api == "v1"
    for name, value in tls.environment().items():
        monkeypatch.setenv(name, value)
    async with client_of(url, timeout_s=5) as client:
        assert (await client.get_job(ONLY_JOB)).phase

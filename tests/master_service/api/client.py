"""A client of the REST application without a socket, and the check of a problem answer."""

from __future__ import annotations

from typing import Any

import httpx

from master_service.api.app import make_app
from master_service.cluster.leader import JobsLed
from trireme_shared.platform.security.access import Access
from trireme_shared.platform.security.tokens import Tokens


def client_of(master: JobsLed, token: str = "", given: str = "") -> httpx.AsyncClient:
    access = Access.of(Tokens(given=token), ["master"])
    transport = httpx.ASGITransport(make_app(master, access), raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {given}"} if given else {}
    return httpx.AsyncClient(transport=transport, base_url="http://master", headers=headers)


def check_problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert set(problem) == {
        "type", "title", "status", "detail", "code", "retryable", "hint", "request_id", "details", "errors",
    }  # fmt: skip
    assert (problem["status"], problem["code"]) == (status, code)
    assert problem["request_id"] == response.headers["x-request-id"] != ""
    assert "Traceback" not in response.text
    return problem

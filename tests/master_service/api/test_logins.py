"""A browser logs in by a code: once, within its time, with the role of the token that the code was made with,
whoever leads by then; and `trireme dashboard`, which opens it."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from master_service.api.app import make_app
from master_service.api.logins import MOST, VALID_S, LoginCodes
from master_service.api.middleware import MAX_BODY_BYTES
from master_service.api.server import Server
from tests.equipment.tokens import access_by_role
from tests.equipment.uvicorn_server import served
from tests.master_service.api.client import check_problem
from tests.master_service.api.test_auth import client_with
from tests.master_service.cluster import MasterCluster, leading, spec_of
from trireme_shared.platform.security.tokens import Role
from trireme_shared.protocol.errors import Unauthorized

CODES, LOGINS = "/v1/login-codes", "/v1/logins"
FORWARD = {"Trireme-Forward": "leader"}
LIMIT_S = 60.0


def test_a_code_is_good_once_and_for_a_while():
    codes = LoginCodes()
    first, second = codes.create("one", 0.0), codes.create("two", 1.0)
    assert codes.use(first, VALID_S - 0.1) == "one"
    for code, now in ((first, VALID_S - 0.1), (second, VALID_S + 1.0), ("", 0.0), ("guessed", 0.0)):
        with pytest.raises(Unauthorized, match="used already, is older than 120 s, or another process"):
            codes.use(code, now)
    many = [codes.create(str(number), 200.0) for number in range(MOST + 1)]
    with pytest.raises(Unauthorized):
        codes.use(many[0], 200.0)
    assert codes.use(many[1], 200.0) == "1"
    assert f"{MOST - 1} not used" in repr(codes)


async def much() -> AsyncIterator[bytes]:
    """A body that would be refused if it was read."""
    for _ in range(MAX_BODY_BYTES // 2**16 + 1):
        yield bytes(2**16)


async def test_a_code_gives_the_token_it_was_made_with_and_nothing_more(tmp_path: Path):
    access = access_by_role(tmp_path / "tokens", ["master"])
    cluster = MasterCluster(spec_of())
    with capture_logs() as entries:
        async with leading(cluster.master("m1")) as master:
            app = make_app(master, access)
            for token in (None, "", "wrong"):
                async with client_with(app, token) as client:
                    check_problem(await client.post(CODES), 401, "UNAUTHENTICATED")
            codes = {}
            for role in Role:
                async with client_with(app, role.value, **FORWARD) as client:
                    made = (await client.post(CODES)).json()
                assert made["valid_s"] == VALID_S
                codes[role] = made["code"]
            async with client_with(app, codes[Role.ADMIN]) as client:
                check_problem(await client.get("/v1/job"), 401, "UNAUTHENTICATED")  # it is no token
                foreign = {"Origin": "http://elsewhere"}
                check_problem(await client.post(LOGINS, headers=foreign), 403, "ORIGIN_NOT_ALLOWED")
        # nobody leads at this master any more
        for role, code in codes.items():
            async with client_with(app, code, **FORWARD) as client:
                given = await client.post(LOGINS, content=much())
                assert (given.status_code, given.json()) == (200, {"token": role.value})
                again = check_problem(await client.post(LOGINS), 401, "UNAUTHENTICATED")
                assert "trireme dashboard" in again["hint"]
        async with client_with(make_app(cluster.master("m2"), access), "viewer") as client:
            elsewhere = (await client.post(CODES)).json()["code"]  # a standby
        async with client_with(app, elsewhere) as client:
            for _ in range(20):
                check_problem(await client.post(LOGINS), 401, "UNAUTHENTICATED")
    told = str(entries)
    assert "trireme_login" not in told
    assert [each["event"] for each in entries].count("login_code_used") == len(Role)
    assert "'caller': 'token t0 at 127.0.0.1'" in told
    refused = [each for each in entries if each.get("path") == LOGINS and each["event"] == "request_failed"]
    assert len(refused) == 1, "whoever has no token cannot fill the log"


BROWSER = """#!/bin/sh
echo "$1" > "$0.opened"
"""


async def trireme_dashboard(*words: str, **environment: str) -> tuple[int, str, str]:
    left_out = ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY", "TRIREME_TOKEN_FILE")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "trireme", "dashboard", *words),
        env=kept | environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_the_command_opens_a_browser_that_is_logged_in_or_prints_the_address(tmp_path: Path):
    browser = tmp_path / "browser"
    browser.write_text(BROWSER)
    browser.chmod(0o700)
    access = access_by_role(tmp_path / "tokens", ["127.0.0.1"])
    async with (
        leading(MasterCluster(spec_of()).master()) as master,
        served(Server(make_app(master, access))) as port,
    ):
        url = f"http://127.0.0.1:{port}"
        where = {"TRIREME_URL": url, "TRIREME_TOKEN": "viewer", "TMPDIR": str(tmp_path)}
        opening = trireme_dashboard("my_job", BROWSER=str(browser), **where)
        opened, printed, refused = await asyncio.gather(
            opening,
            trireme_dashboard(**where),
            trireme_dashboard(BROWSER=str(browser), **where | {"TRIREME_TOKEN": "wrong"}),
        )
        assert opened[:2] == (0, ""), opened
        assert f"{url}/#/jobs/my-job is open in a browser, logged in" in opened[2]
        assert refused[0] == 5, refused
        assert "unknown or has expired" in refused[2]
        page = Path(browser.with_name("browser.opened").read_text().strip().removeprefix("file://"))
        assert stat.S_IMODE(page.stat().st_mode) == 0o600, "other users must not read the code"
        assert stat.S_IMODE(page.parent.stat().st_mode) == 0o700
        [login] = set(re.findall(rf"{url}/#/login/(trireme_login_[\w-]+)/jobs/my-job\"", page.read_text()))
        assert printed[0] == 0
        assert (
            "there is no browser here; this address logs in whoever opens it first, within 120 s"
            in printed[2]
        )
        [other] = re.findall(rf"^{url}/#/login/(trireme_login_[\w-]+)/$", printed[1], re.MULTILINE)
        for code in (login, other):
            async with client_with(make_app(master, access), code) as client:
                check_problem(await client.post(LOGINS), 401, "UNAUTHENTICATED")  # of another process
        async with httpx.AsyncClient(base_url=url) as client:
            for code in (login, other):
                given = await client.post(LOGINS, headers={"Authorization": f"Bearer {code}"})
                assert given.json() == {"token": "viewer"}

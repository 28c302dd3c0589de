"""The page at a master's `/` without a browser: what is served, with which headers, how large it is, and that
it is what its sources give."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from clients.build_dashboard import build
from clients.tools import DASHBOARD
from master_service.api.app import make_app
from master_service.api.openapi.documentation import FILES as PAGES
from master_service.cluster.leader import JobsLed
from master_service.dashboard import BUILT, FILES, POLICY
from tests.equipment.tokens import access_by_role
from tests.equipment.virtual_loop import run_virtually
from tests.master_service.api.client import client_of
from tests.master_service.api.test_auth import client_with
from tests.master_service.cluster import MasterCluster, leading, running, spec_of
from tests.master_service.many_jobs import Jobs
from trireme_shared.platform.security.tokens import Role

ROOT = Path(__file__).parents[3]
MOST_BYTES = 220_000
DIRECTIVES = dict(part.strip().split(" ", 1) for part in POLICY.split(";"))


async def check_pages(jobs: JobsLed) -> None:
    async with client_of(jobs, token="secret") as client:
        for path, (file, content_type) in PAGES.items():
            answer = await client.get(path)
            assert (answer.status_code, answer.headers["content-type"]) == (200, content_type), path
            assert answer.content == file.read_bytes()
            headers = answer.headers
            assert (
                headers["content-security-policy"] == POLICY
                if path in FILES
                else "frame-ancestors 'none'" in headers["content-security-policy"]
            )
            assert headers["x-frame-options"] == "DENY"
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
            assert (
                headers["cross-origin-opener-policy"]
                == headers["cross-origin-resource-policy"]
                == "same-origin"
            )
            assert not any(name.startswith("access-control-") for name in headers)
            assert (await client.get(path, headers={"If-None-Match": headers["etag"]})).status_code == 304
            assert (await client.head(path)).status_code == 200
        assert (await client.get("/dashboard/index.html")).status_code == 404
        assert (await client.get("/dashboard/../__init__.py")).status_code in (401, 404)
        foreign = await client.get("/", headers={"Host": "evil.example"})
        assert foreign.status_code == 421


async def test_the_master_of_one_job_serves_it_and_says_elsewhere_what_there_is() -> None:
    async with leading(MasterCluster(spec_of()).master()) as master:
        await check_pages(master)


def test_a_clusters_leader_and_its_standby_serve_it() -> None:
    async def main() -> None:
        jobs = Jobs()
        async with jobs.leading() as leader:
            await check_pages(leader)
            await check_pages(jobs.master("m2"))

    run_virtually(main)


def test_its_policy_lets_in_nothing_from_elsewhere_and_no_script_or_style_in_the_page() -> None:
    assert DIRECTIVES["default-src"] == DIRECTIVES["frame-ancestors"] == DIRECTIVES["form-action"] == "'none'"
    assert DIRECTIVES["script-src"] == DIRECTIVES["style-src"] == DIRECTIVES["connect-src"] == "'self'"
    assert "unsafe" not in POLICY
    page = (BUILT / "index.html").read_text()
    assert not re.search(r"<style|style=|\son\w+=|<script>|javascript:", page)
    assert re.findall(r'(?:src|href)="([^"]*)"', page) == [
        "data:,",
        "dashboard/app.css",
        "about",
        "dashboard/app.js",
    ]


def test_its_files_name_no_other_host_than_those_of_messages_and_namespaces() -> None:
    found = {
        host
        for file in BUILT.glob("*.*s")
        for host in re.findall(r"(?:https?:|[\"'(`])//([\w.-]+\.\w+)", file.read_text())
    }
    assert found <= {"svelte.dev", "github.com", "www.w3.org"}, (
        "Svelte's errors name a page about them, elements their namespaces"
    )
    assert "@import" not in (BUILT / "app.css").read_text()


def test_it_is_small_and_needs_nothing_that_is_not_in_the_wheel() -> None:
    assert sum(file.stat().st_size for file in BUILT.iterdir()) < MOST_BYTES
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    shipped = told["master_service.dashboard"]
    for file, _ in FILES.values():
        assert any(fnmatch(str(file.relative_to(BUILT.parent)), pattern) for pattern in shipped), file


@pytest.mark.timeout(300)  # the first time on a machine, npm fetches the packages
def test_what_is_served_is_what_the_sources_give(tmp_path: Path) -> None:
    build(tmp_path / "built")
    made = {file.name: file.read_bytes() for file in (tmp_path / "built").iterdir()}
    served = {file.name: file.read_bytes() for file in BUILT.iterdir()}
    assert made.keys() == served.keys()
    assert [name for name in made if made[name] != served[name]] == [], "run `make dashboard`"


def test_the_versions_of_what_it_is_built_with_are_pinned() -> None:
    lock = (DASHBOARD / "package-lock.json").read_text()
    versions = re.findall(
        r'"(?:axe-core|esbuild|svelte|uplot)": "([^"]*)"', (DASHBOARD / "package.json").read_text()
    )
    assert len(versions) == 4
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in versions)
    assert lock.count('"integrity"') >= 4


async def test_a_token_learns_its_role(tmp_path: Path) -> None:
    access = access_by_role(tmp_path / "tokens", ["master"])
    standby = MasterCluster(spec_of()).master()
    for role in Role:
        async with client_with(make_app(standby, access), role) as client:
            assert (await client.get("/v1/access")).json() == {"role": role}
    async with client_of(standby) as client:
        assert (await client.get("/v1/access")).json() == {"role": "admin"}, "nobody is asked for a token"


async def test_members_say_how_many_slots_they_own() -> None:
    async with running(MasterCluster(spec_of(pservers=2)), "t1") as master, client_of(master) as client:
        members = (await client.get("/v1/members")).json()["members"]
        assert (
            sum(member["slots"] for member in members if member["kind"] == "pserver")
            == master.job.spec.slot_count
        )
        assert [member["slots"] for member in members if member["kind"] == "trainer"] == [None]

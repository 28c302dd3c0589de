"""Passwords in the URLs of jobs: no answer of REST shows one, whatever it tells of."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from master_service.api.app import make_api
from master_service.api.middleware import WithoutPasswords, shows_users_texts
from master_service.cluster.leader import ClusterMaster
from master_service.core.changes import Event
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.api.client import check_problem, client_of
from tests.master_service.many_jobs import Jobs, job_of
from tests.shared.protocol.test_urls import PASSWORD, spec_with_passwords
from trireme_shared.protocol.records.cluster import Standing

FILE = f"sftp://me:{PASSWORD}@host/train-1.txt"  # as a glob names it: plain text


def getting(leader: ClusterMaster, job: str) -> list[str]:
    """The paths of all GETs of a cluster."""
    document = make_api(leader).openapi()["paths"]
    paths = [path for path, methods in document.items() if "get" in methods and path.startswith("/v1/")]
    return [re.sub(r"{\w+}", "none", path.replace("{job}", job)) for path in paths]


async def check_answers(client: httpx.AsyncClient, leader: ClusterMaster, job: str) -> dict[str, str]:
    """No answer has the password; returns what they show."""
    shown = {}
    for path in getting(leader, job):
        answer = await client.get(path)
        assert PASSWORD not in answer.text, path
        assert len(answer.content) == int(answer.headers["content-length"]), path
        shown[path] = answer.text
    return shown


def test_no_route_shows_a_password_of_a_job_that_waits_trains_or_has_failed() -> None:
    async def main() -> None:
        jobs = Jobs(task_s=1.0)
        async with jobs.leading() as leader, client_of(leader) as client:
            spec = spec_with_passwords()
            urls = {name: getattr(spec, name) for name in ("script", "storage", "dataset", "init_from")}
            job = job_of("a")
            await leader.create_job(job.with_fields(spec=job.spec.model_copy(update=urls)), None)
            leader.events.add([Event("file_lost", f"{FILE} is gone", {"file": FILE})])
            shown = await check_answers(client, leader, "a")
            assert "sftp://***@host/train.txt" in shown["/v1/jobs/a"]
            assert "sftp://***@host/jobs" in shown["/v1/jobs/a"]
            async with jobs.pool(1, 1):
                await until(lambda: leader.state.job("a").standing is Standing.ACTIVE, "the job to start")
                await until(lambda: leader.term.jobs["a"].master.current_term is not None, "its term")
                master = leader.term.jobs["a"].master
                master.events.add([Event("task_failed", f"{FILE} cannot be read", {"file": FILE})])
                await until(lambda: master.job.phase_since is not None, "it to begin")
                shown = await check_answers(client, leader, "a")
                assert "sftp://***@host/jobs" in shown["/v1/jobs/a"]
                await leader.cancel_job("a")
                await until(lambda: not leader.term.jobs, "its term to end")
            shown = await check_answers(client, leader, "a")
            assert "sftp://***@host/train-1.txt cannot be read" in shown["/v1/jobs/a/events"]
            assert "sftp://***@host/train-1.txt is gone" in shown["/v1/cluster/events"]
            found = await jobs.etcd.get(jobs.keys.job("a"))
            assert found is not None
            assert PASSWORD.encode() in found.value  # where members read it

    run_virtually(main)


async def test_a_problem_shows_no_password() -> None:
    async with Jobs().leading() as leader, client_of(leader) as client:
        settings = {"dataset": {"kind": "text_lines", "urls": [FILE]}, "init_from": FILE}
        body = {"name": "a", "settings": settings, "script": FILE}
        problem = check_problem(await client.post("/v1/jobs", json=body), 422, "INVALID_ARGUMENT")
        assert PASSWORD not in str(problem)
        settings.pop("init_from")
        refused = await client.post("/v1/jobs", json={**body, "storage": FILE})
        problem = check_problem(refused, 400, "INVALID_ARGUMENT")
        assert "sftp://***@host/train-1.txt" in problem["detail"]


@pytest.mark.parametrize(
    ("path", "hides"),
    [
        ("/v1/jobs/a", True),
        ("/v1/job", True),
        ("/v1/jobs/a/events/stream", True),
        ("/v1/jobs/a/logs", True),
        ("/v1/task-leases", False),
        ("/v1/jobs/a/task-leases/0-1/complete", False),
        ("/v1/jobs/a/source", False),
        ("/openapi.json", False),
    ],
)
def test_members_get_the_urls_that_they_open(path: str, hides: bool) -> None:
    assert shows_users_texts(path) is hides


async def test_a_stream_is_sent_message_by_message_and_an_answer_is_as_long_as_it_says() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    hiding = WithoutPasswords(send)
    text = f'{{"file":"{FILE}"}}'.encode()
    await hiding(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]}
    )
    assert not sent
    await hiding({"type": "http.response.body", "body": text})
    shown = b'{"file":"sftp://***@host/train-1.txt"}'
    assert sent[0]["headers"] == [(b"content-length", b"%d" % len(shown))]
    assert sent[1]["body"] == shown
    await hiding({"type": "http.response.body", "body": b"id: 1\n\n", "more_body": True})
    assert sent[2] == {"type": "http.response.body", "body": b"id: 1\n\n", "more_body": True}

"""What the first requests need is made before somebody waits for it, and not while the master takes over."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import TypeAdapter

from master_service.api.app import make_api, warm_up
from master_service.api.openapi import document
from tests.equipment.replaced import replaced
from tests.master_service.cluster import MasterCluster, spec_of
from trireme_shared.protocol.errors import NotLeader, NotReady, TriremeError


class Leads:
    """`answers`: to the first questions whether it leads; then it does."""

    def __init__(self, *answers: TriremeError) -> None:
        self.answers = list(answers)
        self.asked = 0

    def check_leading(self) -> None:
        self.asked += 1
        if self.answers:
            raise self.answers.pop(0)


@pytest.mark.parametrize(
    ("answers", "asked"),
    [((NotReady("takes over"), NotReady("takes over")), 3), ((NotLeader("stands by"),), 1), ((), 1)],
)
async def test_a_master_warms_up_once_it_leads_or_stands_by(
    answers: tuple[TriremeError, ...], asked: int
) -> None:
    master, leads = MasterCluster(spec_of()).master(), Leads(*answers)
    api = make_api(master)
    made: list[threading.Thread] = []
    make_document = api.openapi

    def make() -> dict[str, Any]:
        assert not leads.answers, "in the takeover"
        made.append(threading.current_thread())
        return make_document()

    api.openapi = make  # type: ignore[method-assign]
    await warm_up(api, leads, 0.001)  # type: ignore[arg-type]
    assert (leads.asked, len(made)) == (asked, 1)
    assert made[0] is not threading.main_thread(), "requests would wait"


async def made_by_the_first_request(*, warm: bool) -> int:
    """How many validators."""
    api = make_api(MasterCluster(spec_of()).master())
    if warm:
        await warm_up(api, Leads(), 0.0)  # type: ignore[arg-type]
    count, make = 0, TypeAdapter.__init__

    def counted(adapter: Any, *values: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        make(adapter, *values, **options)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://master") as client:
        with replaced(TypeAdapter, "__init__", counted):
            assert (await client.get("/v1/version?x=1")).status_code == 422
    return count


@pytest.fixture
def fresh_documents(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Every application makes its own; the threads in which they were made."""
    threads: list[threading.Thread] = []
    made = inspect.unwrap(document.new_document)

    def make(app: FastAPI) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return made(app)

    monkeypatch.setattr(document, "new_document", make)
    return threads


@pytest.mark.parametrize(
    "request_line", ["GET /v1/version?x=1", "OPTIONS /v1/version", "PUT /v1/version", "GET /openapi.json"]
)
async def test_the_first_request_that_needs_the_document_does_not_hold_the_event_loop(
    fresh_documents: list[threading.Thread], request_line: str
) -> None:
    """A master that held it for seconds, on a busy machine, lost its lease as soon as somebody followed its
    events."""
    api, (method, path) = make_api(MasterCluster(spec_of()).master()), request_line.split()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://master") as client:
        await asyncio.gather(*(client.request(method, path) for _ in range(3)))
    assert len(fresh_documents) == 1
    assert threading.main_thread() not in fresh_documents


@pytest.mark.usefixtures("fresh_documents")
async def test_the_first_request_makes_nothing_after_that() -> None:
    assert await made_by_the_first_request(warm=True) == 0
    assert await made_by_the_first_request(warm=False) > 50

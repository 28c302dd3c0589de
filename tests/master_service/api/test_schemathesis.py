"""Requests that schemathesis makes up from the API's document, valid ones and invalid ones, against a cluster's leader that runs the
jobs which they create, in virtual time. Each answer must be as the document says.

Not checked here: that every valid request is accepted (values that do not fit together are refused, which a schema cannot say), and
tokens (test_auth.py asks every route with each of them).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.transport import Response
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance

from master_service.api.app import make_api, make_app
from tests.equipment.logs import configured
from tests.equipment.virtual_loop import VirtualLoop, isolated
from tests.master_service.many_jobs import Jobs

LEAST_CASES = 1000
EACH_WAY = 12  # requests for each operation, valid and invalid ones
URL = "http://127.0.0.1"
EXCLUDED = [
    positive_data_acceptance,
    ignored_auth,
    not_a_server_error,
]  # 503 and 504 are documented; 500 is found below
FINDINGS = 20  # then it is enough
QUICKLY: dict[str, Any] = {
    "phases": [Phase.generate],
    "deadline": None,
    "database": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
}


class Loop(VirtualLoop):
    """What is given to a thread (files are deleted in one) is done at once."""

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        ended = self.create_future()
        ended.set_result(func(*args))
        return ended


class Fuzzed:
    """A leader on a virtual loop, which runs as long as a request does; and what was found."""

    def __init__(self) -> None:
        self.cases = 0
        self.by_status: dict[int, int] = {}
        self.findings: list[str] = []
        self._isolated = ExitStack()
        self._isolated.enter_context(isolated(random.Random(1), offline=False))
        self.loop = Loop(max_seconds=1e9, max_callbacks=10**9)
        self._open = AsyncExitStack()
        self.loop.run_until_complete(self._begin())

    async def _begin(self) -> None:
        jobs = Jobs(tasks=6, task_s=5.0)
        self.leader = await self._open.enter_async_context(jobs.leading())
        await self._open.enter_async_context(jobs.pool(trainers=2, pservers=1))
        transport = httpx.ASGITransport(make_app(self.leader), raise_app_exceptions=False)
        self._client = await self._open.enter_async_context(httpx.AsyncClient(transport=transport, base_url=URL))

    def end(self) -> None:
        self.loop.run_until_complete(self._open.aclose())
        self.findings += [str(error) for error in self.loop.errors]
        self.loop.close()
        self._isolated.close()

    def send(self, case: Any) -> Response:
        given = case.as_transport_kwargs(base_url=URL)
        given.pop("cookies", None)
        asked = requests.Request(**given).prepare()
        body = asked.body.encode() if isinstance(asked.body, str) else asked.body or b""
        headers = [
            (_raw(name), _raw(value)) for name, value in asked.headers.items() if name.lower() != "content-length"
        ]
        answering = self._client.request(str(asked.method), str(asked.url), headers=headers, content=body, timeout=120)
        answer = self.loop.run_until_complete(answering)
        self.cases += 1
        self.by_status[answer.status_code] = self.by_status.get(answer.status_code, 0) + 1
        return Response.from_httpx(answer, verify=True)

    def check(self, response: Response, case: Any, **options: Any) -> None:
        try:
            case.validate_response(response, excluded_checks=EXCLUDED, **options)
        except (AssertionError, BaseExceptionGroup) as error:
            found = getattr(error, "exceptions", [error])
            self.findings += [f"{case.operation.label}: {type(each).__name__}: {each}"[:1500] for each in found]
        if response.status_code == 500:
            self.findings.append(f"{case.operation.label}: {response.text}\n{case.as_curl_command()}")
        assert len(self.findings) < FINDINGS, "\n\n".join(self.findings)

    def ask(self, case: Any) -> None:
        self.check(self.send(case), case)


def _raw(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8")


@pytest.fixture
def fuzzed() -> Iterator[Fuzzed]:
    with configured(lambda *_: None):  # thousands of lines
        made = Fuzzed()
        try:
            yield made
        finally:
            made.end()


def schema_of(fuzzed: Fuzzed) -> Any:
    document = make_api(fuzzed.leader).openapi()
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["security"] = []
            del operation["responses"]["default"]  # each status must be named
    return schemathesis.openapi.from_dict(document)


@pytest.mark.timeout(300)
def test_schemathesis_finds_nothing(fuzzed: Fuzzed) -> None:
    schema = schema_of(fuzzed)
    for found in schema.get_all_operations():
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            cases = found.ok().as_strategy(generation_mode=mode)
            fuzz = settings(max_examples=EACH_WAY, **QUICKLY)(given(case=cases)(fuzzed.ask))
            try:
                fuzz()
            except Unsatisfiable:
                assert mode is GenerationMode.NEGATIVE  # without parameters, nothing can be wrong

    assert not fuzzed.findings, "\n\n".join(fuzzed.findings)
    assert fuzzed.cases >= LEAST_CASES, fuzzed.cases
    assert {200, 201, 404, 409, 422} <= fuzzed.by_status.keys(), fuzzed.by_status

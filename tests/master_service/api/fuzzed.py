"""A cluster's leader that is asked what schemathesis makes up, in virtual time, and what was found.

Each world has a job that runs, with two checkpoints, a metric, a resize and a task in work, and a job that
has ended. Most valid requests ask about them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import requests
import schemathesis
from fastapi import FastAPI
from schemathesis.checks import not_a_server_error
from schemathesis.core.transport import Response
from schemathesis.generation.stateful.state_machine import normalize_name
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance, use_after_free
from starlette.types import ASGIApp

from master_service.api.app import api_of, serve_from
from master_service.api.middleware import Guarded
from master_service.api.routes.logs import LogSource
from master_service.api.routes.tasks import DirectTaskLeases
from master_service.cluster.leader import ClusterMaster
from tests.equipment.logs import configured
from tests.equipment.quick_draws import quick_draws
from tests.equipment.virtual_loop import VirtualLoop, isolated
from tests.equipment.waiting import until
from tests.master_service.api.test_cluster_rest import SETTINGS
from tests.master_service.control.restoring import checkpoint
from tests.master_service.many_jobs import ROOT, Jobs
from trireme_shared.platform.security.access import Access
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.cluster import Standing

URL = "http://127.0.0.1"
RUNNING, ENDED, LOG = "digits", "ended", "h-trainer-0-1"
SOURCE = {"file_name": "train.py", "text": "print(1)"}
ACQUIRE = "POST /v1/jobs/{job}/task-leases"
CREATE = "POST /v1/jobs"
TASK = "/task-leases/{task_id}/"
DELETE = "DELETE /v1/jobs/{job}"
GET_OPERATION = "GET /v1/jobs/{job}/operations/{operation_id}"
SOMETIMES = 0.5
OFTEN = 0.8  # of the valid requests that do not follow from an answer are about what is there
EXCLUDED = [
    positive_data_acceptance,
    ignored_auth,
    not_a_server_error,
]  # 503 and 504 are documented; 500 is found below
FINDINGS = 20  # then it is enough


class Loop(VirtualLoop):
    """What is given to a thread (files are deleted in one) is done at once."""

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        ended = self.create_future()
        ended.set_result(func(*args))
        return ended


def app_of(leader: ClusterMaster, logs: LogSource) -> ASGIApp:
    """As make_app does; but FastAPI reads the routes once, for all worlds."""
    api = _api()
    serve_from(api, leader, logs)
    return Guarded(DirectTaskLeases(api, leader), Access())


@cache
def _api() -> FastAPI:
    return api_of(clustered=True)


class World:
    """A leader and its pool, on a virtual loop which runs as long as a request does."""

    def __init__(self, logs: LogSource) -> None:
        self._isolated = ExitStack()
        self._isolated.enter_context(isolated(random.Random(1), offline=False))
        self.loop = Loop(max_seconds=1e9, max_callbacks=10**9)
        self._open = AsyncExitStack()
        self._logs = logs
        self.jobs = Jobs(tasks=6, task_s=60.0)
        self.loop.run_until_complete(self._begin())

    async def _begin(self) -> None:
        jobs = self.jobs
        self.leader = leader = await self._open.enter_async_context(jobs.leading())
        await self._open.enter_async_context(jobs.pool(trainers=3, pservers=2))
        transport = httpx.ASGITransport(app_of(leader, self._logs), raise_app_exceptions=False)
        self.client = await self._open.enter_async_context(
            httpx.AsyncClient(transport=transport, base_url=URL)
        )
        settings = {
            **SETTINGS,
            "checkpoint_kind": "coordinated",
            "epochs": 1000,
            "trainers": 2,
            "post_tasks": ["true"],
        }
        await self._post("/v1/jobs", {"name": RUNNING, "settings": settings, "source": SOURCE})
        await until(self._trainers, "the job to run")
        await self._post("/v1/jobs", {"name": ENDED, "settings": SETTINGS, "source": SOURCE})
        await self._post(f"/v1/jobs/{ENDED}/cancel")
        await until(lambda: leader.state.job(ENDED).standing is Standing.CANCELLED, "the other job to end")
        trainer, job = self._trainers()[0], f"/v1/jobs/{RUNNING}"
        steps = [{"step": 1, "epoch": 0, "loss_sum": 1.5, "records": 8}]
        await self._post(f"{job}/metric-batches", {"trainer": trainer, "steps": steps})
        generation = leader.find(RUNNING).job.state.generation
        # its first checkpoint may pause it
        ask = {"trainer": trainer, "generation": generation, "wait_s": 20}
        task = (await self._post(f"{job}/task-leases", {**ask, "request": "fuzz"}))["task"]
        skipped = (await self._post(f"{job}/task-leases", {**ask, "request": "skipped"}))["task"]["task_id"]
        await self._post(f"{job}/tasks/{skipped}/skip")
        resize = await self._post(f"{job}/resizes", {"trainers": 3})
        await checkpoint(jobs, 40, 30, keys=Keys(RUNNING, ROOT), mode=Mode.ASYNC)
        await until(lambda: leader.find(RUNNING).job.members.latest, "the checkpoints to be seen")
        self.names = {
            "job": RUNNING,
            "member_id": trainer,
            "name": "loss",
            "task_id": task["task_id"],
            "checkpoint_id": "at-40",
            "resize_id": resize["operation_id"],
            "operation_id": resize["operation_id"],
            "member": "t0",
            "log": LOG,
        }
        self.names_for = {
            DELETE: {"job": ENDED},
            "POST /v1/jobs/{job}/tasks/{task_id}/retry": {"task_id": skipped},
        }
        self.report = {"trainer": trainer} | {name: task[name] for name in ("attempt", "epoch", "timeline")}

    async def _post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        answer = await self.client.post(path, json=body)
        assert answer.is_success, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def _trainers(self) -> list[str]:
        led = self.leader.term.jobs.get(RUNNING)
        ready = led is not None and led.master.current_term is not None
        return sorted(led.master.job.trainers.names) if led and ready else []

    def close(self) -> list[str]:
        """Errors that nobody handled."""
        self.loop.run_until_complete(self._open.aclose())
        errors = [str(error) for error in self.loop.errors]
        self.loop.close()
        self._isolated.close()
        return errors


class Fuzzed:
    """Asks the present world, and remembers how it answered."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of logs."""
        path = folder / RUNNING / f"{LOG}.log"
        path.parent.mkdir()
        path.write_text("begun\nended\n", encoding="utf-8")
        self._logs = LogSource((str(folder),), by_job=True)
        self._tags: set[str] = set()
        self.cases = 0
        self.by_status: Counter[int] = Counter()
        self.answers: Counter[tuple[str, int]] = Counter()
        self.findings: list[str] = []
        self._random = random.Random(1)
        self.world = World(self._logs)

    def renew(self) -> None:
        self.close()
        self.world = World(self._logs)

    def close(self) -> None:
        self.findings += self.world.close()

    def ask(self, case: Any) -> None:
        """About what is there, instead of names that were made up."""
        names = self.world.names | self.world.names_for.get(case.operation.label, {})
        if self._is_placed(case):
            for name in names.keys() & case.path_parameters.keys():
                case.path_parameters[name] = names[name]
            if case.operation.path.endswith("/resize-prediction"):
                case.query["trainers"] = 3
            if TASK in case.operation.path and isinstance(case.body, dict):
                case.body |= {name: value for name, value in self.world.report.items() if name in case.body}
        self.place(case)
        self.check(self.send(case), case)

    def place(self, case: Any) -> None:
        """A trainer that works for the job that runs, no version, and (sometimes) settings that go together,
        instead of those that were made up."""
        if case.headers.get("If-Match") not in self._tags and self._is_placed(case):
            case.headers.pop("If-Match", None)
        if case.operation.label == DELETE and self._is_placed(case):
            case.query["wait_s"] = 30  # until it is gone
        if not isinstance(case.body, dict):
            return
        if case.operation.label == CREATE and self._is_placed(case) and self._random.random() < SOMETIMES:
            case.body["settings"] = deepcopy(SETTINGS)
        if "trainer" not in case.body or not self._is_placed(case):
            return
        case.body["trainer"] = self.world.report["trainer"]
        if case.operation.label == ACQUIRE:
            case.body |= {"stream": None, "look": False}
            case.headers.pop("Idempotency-Key", None)  # it would have to be the same as `request`

    def _is_placed(self, case: Any) -> bool:
        return bool(case.meta.generation.mode.is_positive) and self._random.random() < OFTEN

    def send(self, case: Any) -> Response:
        given = case.as_transport_kwargs(base_url=URL)
        given.pop("cookies", None)
        asked = requests.Request(**given).prepare()
        body = asked.body.encode() if isinstance(asked.body, str) else asked.body or b""
        headers = [
            (_raw(name), _raw(value))
            for name, value in asked.headers.items()
            if name.lower() != "content-length"
        ]
        world = self.world
        answering = world.client.request(
            str(asked.method), str(asked.url), headers=headers, content=body, timeout=120
        )
        answer = world.loop.run_until_complete(answering)
        self.cases += 1
        self.by_status[answer.status_code] += 1
        self._tags.add(answer.headers.get("ETag", ""))
        self.answers[case.operation.label, answer.status_code] += 1
        return Response.from_httpx(answer, verify=True)

    def check(self, response: Response, case: Any, **options: Any) -> None:
        if len(self.findings) > FINDINGS:
            return
        excluded = list(EXCLUDED)
        if case.operation.label == GET_OPERATION:
            excluded.append(use_after_free)  # the operation that deletes a job outlives it
        try:
            case.validate_response(response, excluded_checks=excluded, **options)
        except (AssertionError, BaseExceptionGroup) as error:
            found = getattr(error, "exceptions", [error])
            self.findings += [
                f"{case.operation.label}: {type(each).__name__}: {each}"[:1500] for each in found
            ]
        if response.status_code == 500:
            self.findings.append(f"{case.operation.label}: {response.text}\n{case.as_curl_command()}")


def _raw(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8")


@contextmanager
def fuzzing(folder: Path) -> Iterator[Fuzzed]:
    with quick_draws(), configured(lambda *_: None):  # thousands of lines
        made = Fuzzed(folder)
        try:
            yield made
        finally:
            made.close()


def document() -> dict[str, Any]:
    """That of a leader that asks nobody for a token."""
    made = deepcopy(_api().openapi())
    for methods in made["paths"].values():
        for operation in methods.values():
            operation["security"] = []
            del operation["responses"]["default"]  # each status must be named
    lanes = made["components"]["schemas"]["MemberView"]["properties"]["lanes"]["anyOf"][0]
    # schemathesis makes a schema of it that its own validator refuses
    lanes["items"] = lanes.pop("prefixItems")[0]
    return made


def schema_of(described: dict[str, Any]) -> Any:
    """Only the document's own links are followed."""
    schema = schemathesis.openapi.from_dict(described)
    schema.config.phases.stateful.inference.algorithms = []
    return schema


def machine_of(schema: Any) -> Any:
    """schemathesis' state machine, in which each scenario begins at the top: not with what needs the name of
    a job or of a member."""
    machine = schema.as_state_machine()
    labels = [found.ok().label for found in schema.get_all_operations()]
    starts = {normalize_name(f"RANDOM -> {label}"): label for label in labels if "{" not in label}
    for rule in machine.root_rules - starts.keys():
        delattr(machine, rule)
    begins = {label for rule, label in starts.items() if rule in machine.root_rules}
    return type("FromTheTop", (machine,), {"_root_labels": frozenset(begins)})

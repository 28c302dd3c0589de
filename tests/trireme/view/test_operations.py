"""`trireme checkpoint create | restore` against a master played by the test: progress, outcomes, exit
codes."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from trireme.cli import exit_codes
from trireme.cli.checkpoint import find_checkpoint
from trireme.client import AsyncClient
from trireme.view.job_address import open_job, wait_for_operation
from trireme_shared.protocol.errors import CheckpointUnusable, Conflict, DeadlineExceeded, PeerError
from trireme_shared.protocol.records.operations import Operation, OperationKind, OperationState

WAITS = "waiting for a trainer"
RUNNING = Operation(operation_id="op-1", kind=OperationKind.CREATE_CHECKPOINT, reason=WAITS, limit_s=60.0)
DONE = RUNNING.model_copy(
    update={"state": OperationState.DONE, "reason": "the checkpoint is there", "step": 7}
)


@asynccontextmanager
async def master(*answers: Operation):
    """Each GET of the operation gets the next answer; the last one stays."""
    left = list(answers)

    async def operation(_):
        return web.json_response(text=(left.pop(0) if len(left) > 1 else left[0]).model_dump_json())

    async def checkpoints(_):
        kept = {"timeline": 1, "state": "KEPT", "kind": "base"}
        page = [{"checkpoint_id": "abc-1", "step": 12, **kept}, {"checkpoint_id": "def-2", "step": 4, **kept}]
        return web.json_response({"checkpoints": page, "next_page_token": ""})

    app = web.Application()
    app.router.add_get("/v1/operations/op-1", operation)
    app.router.add_get("/v1/checkpoints", checkpoints)
    async with TestServer(app) as server:
        yield lambda: open_job(str(server.make_url("")))


async def test_what_is_waited_for_is_said_once_and_the_end_is_the_answer():
    said = []
    later = RUNNING.model_copy(update={"reason": "waiting for the job to run"})
    async with master(RUNNING, later, DONE) as connect:
        assert await wait_for_operation(connect, RUNNING, 10.0, said.append) == DONE
    assert said == ["waiting for a trainer", "waiting for the job to run", "the checkpoint is there"]


@pytest.mark.parametrize(
    ("code", "error", "exit_code"),
    [("CHECKPOINT_UNUSABLE", CheckpointUnusable, exit_codes.JOB_FAILED),
     ("CONFLICT", Conflict, exit_codes.CONFLICT),
     ("DEADLINE_EXCEEDED", DeadlineExceeded, exit_codes.TIMED_OUT)],
)  # fmt: skip
async def test_a_failed_operation_is_its_error(code, error, exit_code):
    end = {"state": OperationState.FAILED, "error_code": code, "reason": "part 1 has another checksum"}
    async with master(RUNNING.model_copy(update=end)) as connect:
        with pytest.raises(error, match="part 1 has another checksum") as caught:
            await wait_for_operation(connect, RUNNING, 10.0, lambda _: None)
    assert exit_codes.code_of(caught.value) == exit_code


async def test_what_takes_longer_than_one_waits_goes_on_and_is_exit_code_7():
    async with master(RUNNING) as connect:
        with pytest.raises(
            DeadlineExceeded, match=r"still running after 0\.1 s: waiting for a trainer"
        ) as caught:
            await wait_for_operation(connect, RUNNING, 0.1, lambda _: None)
    assert exit_codes.code_of(caught.value) == exit_codes.TIMED_OUT
    assert json.dumps(caught.value.to_map()["details"]) == '{"operation": "op-1"}'


async def test_a_checkpoint_is_named_by_step_or_the_beginning_of_its_id():
    async with master(RUNNING) as connect, connect() as (client, job):
        assert [await find_checkpoint(client, job, which) for which in ("4", "abc")] == ["def-2", "abc-1"]
        with pytest.raises(
            Exception, match=r"no checkpoint 5; there are: step 12 \(abc-1\), step 4 \(def-2\)"
        ):
            await find_checkpoint(client, job, "5")


async def test_of_several_addresses_the_one_that_answers_is_asked_and_a_single_one_is_not_asked_again():
    nowhere = "http://127.0.0.1:9"
    async with master(DONE) as connect, connect() as (client, job):
        assert isinstance(client, AsyncClient)
        async with open_job(f"{nowhere},{client.url}/v1/jobs/digits") as (other, name):
            assert (name, (await other.get_operation(job, "op-1")).step) == ("digits", 7)
    async with asyncio.timeout(5), open_job(nowhere) as (nobody, name):
        with pytest.raises(PeerError, match="cannot be reached"):
            await nobody.get_operation(name, "op-1")

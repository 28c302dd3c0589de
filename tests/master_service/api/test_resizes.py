"""Resizes by REST: 202 with the place of the resize, pages, cancelling, dry runs, and one problem for each
wrong request."""

from __future__ import annotations

import pytest

from tests.equipment.virtual_loop import run_virtually
from tests.master_service.api.client import check_problem, client_of
from tests.master_service.cluster import MasterCluster, running
from tests.master_service.control.restoring import spec
from trireme_shared.protocol.records import Mode


def with_client(check, **changes) -> None:
    async def main() -> None:
        cluster = MasterCluster(spec().model_copy(update=changes))
        async with running(cluster, "t1") as master:
            await check(client_of(master), master)

    run_virtually(main)


def test_a_resize_is_accepted_found_listed_and_cancelled() -> None:
    async def check(client, master) -> None:
        before = master.job.spec.trainers
        asked = await client.post("/v1/resizes", json={"trainers": 3}, headers={"Idempotency-Key": "k"})
        assert asked.status_code == 202
        begun = asked.json()
        resize_id = begun["operation_id"]
        assert asked.headers["Location"] == f"/v1/jobs/j/operations/{resize_id}"
        assert (begun["kind"], begun["state"], begun["resize"]["trainers"]) == ("RESIZE", "RUNNING", 3)
        place = f"/v1/jobs/j/resizes/{resize_id}"
        again = await client.post("/v1/resizes", json={"trainers": 3}, headers={"Idempotency-Key": "k"})
        assert again.json()["operation_id"] == resize_id
        found = (await client.get(place, params={"wait_s": 2})).json()
        assert found["phase"] == "STARTING"
        assert "3 trainers" in found["reason"]
        assert master.job.spec.trainers == 3
        listed = (await client.get("/v1/resizes")).json()["resizes"]
        assert [each["resize_id"] for each in listed] == [resize_id]
        operation = (await client.get(asked.headers["Location"])).json()
        assert (operation["kind"], operation["resize"]["trainers"]) == ("RESIZE", 3)
        check_problem(await client.post("/v1/resizes", json={"trainers": 2}), 409, "CONFLICT")
        cancelled = (await client.post(f"{place}/cancel")).json()
        assert (cancelled["phase"], cancelled["state"]) == ("CANCELLED", "FAILED")
        assert master.job.spec.trainers == before
        check_problem(await client.post(f"{place}/cancel"), 409, "CONFLICT")

    with_client(check, lanes=4)


def test_a_prediction_changes_nothing() -> None:
    async def check(client, master) -> None:
        found = await client.get("/v1/resize-prediction", params={"pservers": 5})
        assert (found.status_code, found.json()["pservers"]) == (200, 5)
        check_problem(
            await client.get("/v1/resize-prediction", params={"pservers": 129}), 400, "INVALID_ARGUMENT"
        )
        older = await client.post("/v1/resizes", json={"pservers": 5, "dry_run": True})
        check_problem(older, 422, "INVALID_ARGUMENT")
        assert not master.job.operations.records

    with_client(check)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "INVALID_ARGUMENT"),
        ({"trainers": 0}, 400, "INVALID_ARGUMENT"),
        ({"pservers": 0}, 400, "INVALID_ARGUMENT"),
        ({"pservers": -1}, 400, "INVALID_ARGUMENT"),
        ({"trainers": 999}, 400, "INVALID_ARGUMENT"),
        ({"pservers": 129}, 400, "INVALID_ARGUMENT"),
    ],
)
def test_a_wrong_request_gets_one_problem_and_changes_nothing(body, status, code) -> None:
    async def check(client, master) -> None:
        before = master.job.spec
        check_problem(await client.post("/v1/resizes", json=body), status, code)
        assert master.job.spec == before
        assert not master.job.operations.records

    with_client(check, mode=Mode.SYNC)


def test_what_is_no_resize_is_not_found() -> None:
    async def check(client, _) -> None:
        check_problem(await client.get("/v1/resizes/none"), 404, "NOT_FOUND")
        made = (await client.post("/v1/checkpoints")).json()["operation_id"]
        check_problem(await client.get(f"/v1/resizes/{made}"), 404, "NOT_FOUND")

    with_client(check)

"""Resizes of a cluster's jobs: the pool follows what was asked for, also if the job's spec had that number
before."""

from __future__ import annotations

import asyncio

from master_service.cluster.leader import ClusterMaster
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.api.client import client_of
from tests.master_service.many_jobs import Jobs, job_of
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.operations import OperationState, ResizePhase

SPEC_TRAINERS = 2  # what the spec says of trainers means nothing in a cluster: the job gets what is idle


def trains_with(leader: ClusterMaster, count: int) -> bool:
    led = leader.term.jobs.get("a")
    return (
        led is not None
        and led.master.current_term is not None
        and len(led.master.job.trainers.names) == count
    )


def job(**values: object):
    return job_of("a", mode=Mode.SYNC, lanes=4, trainers=SPEC_TRAINERS, **values)


def test_a_job_gives_trainers_back_when_it_is_resized_to_the_number_of_its_spec() -> None:
    async def main() -> None:
        jobs = Jobs(tasks=4000)
        async with jobs.leading() as leader, jobs.pool(3, 1), client_of(leader) as client:
            await leader.create_job(job(), None)
            await until(lambda: trains_with(leader, 3), "three trainers")
            shown = (await client.get("/v1/jobs/a")).json()["members"]
            assert (shown["trainers"], shown["trainers_desired"]) == (3, 3)
            asked = (await client.post("/v1/jobs/a/resizes", json={"trainers": SPEC_TRAINERS})).json()
            await until(lambda: trains_with(leader, SPEC_TRAINERS), "one trainer to leave", 120)
            await until(lambda: not ended(leader, asked).running, "the resize to end", 30)
            done = ended(leader, asked)
            assert (done.state, done.resize.phase) == (OperationState.DONE, ResizePhase.COMMITTED)
            assert leader.state.job("a").trainers == SPEC_TRAINERS
            assert sum(assigned.job == "a" for assigned in leader.state.assignments.values()) == 3
            shown = (await client.get("/v1/jobs/a")).json()["members"]
            assert (shown["trainers"], shown["trainers_desired"]) == (2, 2)

    run_virtually(main)


def test_a_job_that_has_all_trainers_that_the_pool_gives_it_is_not_said_to_have_fewer() -> None:
    async def main() -> None:
        jobs = Jobs(tasks=4000)
        async with jobs.leading() as leader, jobs.pool(1, 1), client_of(leader) as client:
            await leader.create_job(job(), None)
            await until(lambda: trains_with(leader, 1), "a trainer")
            told = (await client.get("/v1/jobs/a/explanation")).json()
            assert "FEWER_TRAINERS" not in [told["code"], *(each["code"] for each in told["also"])], told

    run_virtually(main)


def test_a_job_needs_the_number_of_its_spec_once_it_was_asked_for() -> None:
    """So that a launcher starts more members."""

    async def main() -> None:
        jobs = Jobs(tasks=4000)
        async with jobs.leading() as leader, jobs.pool(1, 1), client_of(leader) as client:
            await leader.create_job(job(), None)
            await until(lambda: trains_with(leader, 1), "a trainer")
            assert (await client.get("/v1/pool")).json()["trainers"]["needed"] == 1
            asked = await client.post("/v1/jobs/a/resizes", json={"trainers": SPEC_TRAINERS})
            assert asked.status_code == 202
            await until(lambda: leader.state.job("a").trainers == SPEC_TRAINERS, "the pool to follow", 30)
            assert (await client.get("/v1/pool")).json()["trainers"]["needed"] == SPEC_TRAINERS
            assert ended(leader, asked.json()).running, "the second trainer is not there yet"

    run_virtually(main)


def test_a_job_keeps_all_its_trainers_when_its_parameter_servers_are_resized() -> None:
    async def main() -> None:
        jobs = Jobs(tasks=4000)
        async with jobs.leading() as leader, jobs.pool(3, 1), client_of(leader) as client:
            await leader.create_job(job(), None)
            await until(lambda: trains_with(leader, 3), "three trainers")
            asked = await client.post("/v1/jobs/a/resizes", json={"pservers": 2})
            assert asked.status_code == 202
            await until(lambda: leader.state.job("a").pservers_wanted == 2, "the pool to follow", 30)
            assert leader.state.job("a").trainers is None
            assert trains_with(leader, 3)

    run_virtually(main)


def test_a_job_has_what_is_idle_again_after_a_resize_was_cancelled() -> None:
    async def main() -> None:
        jobs = Jobs(tasks=4000)
        async with jobs.leading() as leader, jobs.pool(3, 1), client_of(leader) as client:
            await leader.create_job(job(), None)
            await until(lambda: trains_with(leader, 3), "three trainers")
            asked = (await client.post("/v1/jobs/a/resizes", json={"trainers": 4})).json()
            await until(lambda: leader.state.job("a").trainers == 4, "the pool to follow", 30)
            cancelled = await client.post(f"/v1/jobs/a/resizes/{asked['operation_id']}/cancel")
            assert cancelled.status_code == 200, cancelled.text
            await until(lambda: leader.state.job("a").trainers is None, "the cap to go", 30)
            assert trains_with(leader, 3)

    run_virtually(main)


def test_a_resize_says_which_job_has_the_trainers_that_it_waits_for() -> None:
    async def main() -> None:
        jobs = Jobs(tasks=4000)
        async with jobs.leading() as leader, jobs.pool(3, 2), client_of(leader) as client:
            await leader.create_job(job(), None)
            await leader.create_job(job_of("b", {"priority": 80, "min_trainers": 2}, mode=Mode.ASYNC), None)
            await until(lambda: trains_with(leader, 1), "one trainer", 60)
            asked = (await client.post("/v1/jobs/a/resizes", json={"trainers": 3})).json()
            path = f"/v1/jobs/a/resizes/{asked['operation_id']}"
            said = "; the pool has 3 trainers; job b of a higher priority (80, here 50) has 2"
            async with asyncio.timeout(30):
                while not (now := (await client.get(path)).json())["reason"].endswith(said):
                    await asyncio.sleep(0.2)
            assert now["reason"] == f"waiting for 3 trainers (there are 1){said}"
            told = (await client.get("/v1/jobs/a/explanation")).json()
            waits = next(each for each in [told, *told["also"]] if each["code"] == "OPERATION_WAITS")
            assert (
                waits["details"][-1]
                == "The pool has 3 trainers; job b of a higher priority (80, here 50) has 2."
            )
            assert waits["hints"] == ["trireme pool", "trireme jobs"]

    run_virtually(main)


def ended(leader: ClusterMaster, asked: dict):
    return leader.find("a").job.operations.find(asked["operation_id"])

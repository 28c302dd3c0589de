"""A request with an Idempotency-Key has its effect once and one answer, whenever its master dies."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from master_service.api.app import make_api
from master_service.core.changes import DropAnswer
from master_service.core.decisions.requests import Once
from master_service.core.state.kept import AT_ONCE, KEPT_ANSWERS, KEPT_ANSWERS_S, KeptAnswers
from tests.equipment.cluster.crash_point import StoppingProcess
from tests.equipment.replaced import replaced
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.api.client import check_problem
from tests.master_service.api.requests_by_key import (
    ASKED,
    WANTED,
    Asked,
    World,
    begin,
    client_of,
    post,
    shown,
)
from trireme_shared.protocol.records.cluster import Standing
from trireme_shared.protocol.records.operations import KeptAnswer
from trireme_shared.protocol.times import rfc3339

SECRET = {"createLoginCode", "createLogin"}  # answers of these are kept nowhere


async def killed(asked: Asked, turns: int) -> bool:
    """The master dies after so many turns of the request; the next one is asked twice. Whether the first one
    had answered."""
    world, process = World(asked.world), StoppingProcess("m1")
    await world.prepare()
    async with world.leading("m1", process) as first:
        path = await process.spawn(begin(world, first, asked))
        call = process.spawn(post(first, path, asked.body))
        process.last_turn = process.turns + turns
        await until(lambda: call.done() or process.dead, "the request to end")
        answered = call.done()
        answers = [shown(asked, call.result())] if answered else []
        process.last_turn = None  # its end takes turns, too
        process.kill()
        async with world.leading("m2") as second:
            answers += [shown(asked, await post(second, path, asked.body)) for _ in range(2)]
            assert answers == [answers[0]] * len(answers), turns
            assert asked.effect(second) == asked.once, turns
            if asked.body is None or "request" not in asked.body:
                changed = (
                    "cause"
                    if "pservers" in (asked.body or {}) or "trainers" in (asked.body or {})
                    else "name"
                )
                other = {**(asked.body or {}), changed: "other"}
                check_problem(await post(second, path, other), 422, "IDEMPOTENCY_KEY_REUSED")
    return answered


async def kill_at_each_turn(asked: Asked) -> int:
    turns = 1
    while not await killed(asked, turns):
        turns += 1
    return turns


@pytest.mark.parametrize("name", ASKED)
def test_a_request_has_one_effect_and_one_answer_whenever_its_master_dies(name: str) -> None:
    turns = run_virtually(kill_at_each_turn, ASKED[name], shuffled=False)
    assert turns > 2, "the master was never killed while it worked"


async def keep_nothing(asked: Asked) -> None:
    with replaced(Once, "_kept", lambda once, _: DropAnswer(once.request.key)):
        await kill_at_each_turn(asked)


@pytest.mark.parametrize(
    "name", ["failTask", "reportSuspect", "cancelResize", "drainPoolMember", "createJob"]
)
def test_without_kept_answers_a_request_is_refused_or_takes_effect_again(name: str) -> None:
    with pytest.raises(AssertionError):
        run_virtually(keep_nothing, ASKED[name], shuffled=False)


def test_every_request_that_changes_something_takes_a_key_and_is_killed_here() -> None:
    async def main() -> set[str]:
        found = set()
        for kind in ("tasks", "cluster"):
            world = World(kind)
            await world.prepare()
            async with world.leading("m1") as master:
                for path, operations in make_api(master).openapi()["paths"].items():
                    posted = operations.get("post", {})
                    if posted.get("operationId") in SECRET:
                        assert "Idempotency-Key" not in str(posted.get("parameters"))
                        continue
                    keys = [
                        each
                        for each in posted.get("parameters", ())
                        if each["name"].lower() == "idempotency-key"
                    ]
                    assert not posted or len(keys) == 1, path
                    found |= {posted["operationId"]} if posted else set()
        return found

    assert run_virtually(main) == {name.partition(" ")[0] for name in ASKED}


def test_the_same_request_in_other_words_has_the_same_answer() -> None:
    async def main() -> None:
        world = World("saved")
        await world.prepare()
        async with world.leading("m1") as master:
            first = await post(master, "/v1/checkpoints", {"cause": "x", "limit_s": 60.0})
            for path, body in (
                ("/v1/jobs/j/checkpoints", {"limit_s": 60, "cause": "x"}),
                ("/v1/checkpoints?wait_s=0", {"cause": "x", "limit_s": 60.0}),
            ):
                assert (await post(master, path, body)).json() == first.json()
            check_problem(
                await post(master, "/v1/checkpoints", {"cause": "y"}), 422, "IDEMPOTENCY_KEY_REUSED"
            )
            assert len(master.job.operations.records) == 1

    run_virtually(main)


def test_each_token_has_keys_of_its_own_for_each_operation() -> None:
    """A key that somebody else had taken was refused, and told that it had been used."""

    async def main() -> None:
        world = World("saved")
        await world.prepare()
        async with world.leading("m1") as master, client_of(master) as client:

            async def asked(token: str, path: str, cause: str) -> str:
                headers = {"Idempotency-Key": "1", "Authorization": f"Bearer {token}"}
                answer = await client.post(path, json={"cause": cause}, headers=headers)
                assert answer.status_code == 202, answer.text
                return str(answer.json()["operation_id"])

            mine = await asked("mine", "/v1/checkpoints", "x")
            theirs = await asked("theirs", "/v1/checkpoints", "y")
            verified = await asked("mine", "/v1/checkpoints/at-40/verify", "")
            assert len({mine, theirs, verified}) == 3
            assert await asked("mine", "/v1/checkpoints", "x") == mine
            kinds = [each.kind for each in master.job.operations.records.values()]
            assert sorted(kinds) == ["CREATE_CHECKPOINT", "CREATE_CHECKPOINT", "VERIFY_CHECKPOINT"]

    run_virtually(main)


def test_requests_at_the_same_time_with_one_key_have_one_effect_and_one_answer() -> None:
    async def main() -> None:
        for name in ("failTask", "reportSuspect", "createResize"):
            asked, world = ASKED[name], World(ASKED[name].world)
            await world.prepare()
            async with world.leading("m1") as master:
                path = await begin(world, master, asked)
                answers = await asyncio.gather(*(post(master, path, asked.body) for _ in range(5)))
                assert len({answer.text for answer in answers}) == 1, name
                assert answers[0].is_success
                assert asked.effect(master) == asked.once

    run_virtually(main)


def test_a_refused_request_keeps_its_key_and_an_answer_outlives_what_it_is_about() -> None:
    async def main() -> None:
        world = World("cluster")
        await world.prepare()
        async with world.leading(
            "m1",
        ) as leader:
            check_problem(await post(leader, "/v1/jobs/none/cancel", None), 404, "NOT_FOUND")
            created = await post(leader, "/v1/jobs", WANTED)
            assert created.status_code == 201
            await leader.cancel_job("new")
            await leader.delete_job("new")
            assert (await post(leader, "/v1/jobs", WANTED)).json() == created.json()
            assert "new" not in leader.state.jobs

    run_virtually(main)


@pytest.mark.parametrize("older_key", [False, True])
def test_an_answer_that_another_version_has_kept_in_another_form_is_not_needed(*, older_key: bool) -> None:
    """It ended in a bug's 500: the job is there, and other requests say that they were carried out.
    `older_key`: as versions kept it which had the same keys for all tokens; it was not found."""

    async def main() -> None:
        world = World("cluster")
        await world.prepare()
        async with world.leading("m1") as leader:
            first = (await post(leader, "/v1/jobs", WANTED, "createJob")).json()
            assert (await post(leader, "/v1/jobs/waits/pause", None, "pauseJob")).is_success
        etcd, keys = world.jobs.etcd, world.jobs.keys
        for each in (await etcd.range(keys.answers, prefix=True)).kvs:
            other = KeptAnswer.from_bytes(each.value).with_fields(answer='{"job": "new", "pservers": 1}')
            if older_key:
                await etcd.delete(each.key)
                own = hashlib.sha256(other.operation.encode()).hexdigest()[:32]
                other = other.with_fields(key=own)
            await etcd.put(keys.answer(other.key), other.to_bytes())
        async with world.leading("m2") as leader:
            again = await post(leader, "/v1/jobs", WANTED, "createJob")
            assert again.status_code == 201
            assert {**again.json(), "reason": "", "master": {}} == {**first, "reason": "", "master": {}}
            refused = await post(leader, "/v1/jobs/waits/pause", None, "pauseJob")
            problem = check_problem(refused, 409, "CONFLICT")
            assert "pauseJob was carried out at" in problem["detail"]
            assert leader.state.job("waits").standing is Standing.PAUSED
            other = {**WANTED, "name": "other"}
            answer = await post(leader, "/v1/jobs", other, "createJob")
            assert answer.status_code == (201 if older_key else 422), "it is another request"

    run_virtually(main)


def kept(number: int, wall_time: float) -> KeptAnswer:
    return KeptAnswer(key=f"k{number}", asked="a", operation="o", answer="{}", create_time=rfc3339(wall_time))


def test_a_bounded_number_of_answers_is_kept_for_a_bounded_time() -> None:
    answers = KeptAnswers()
    start = KEPT_ANSWERS_S + KEPT_ANSWERS
    for number in range(KEPT_ANSWERS + 500):
        for change in (kept(number, start + number), *answers.surplus(start + number)):
            answers.apply(change)
    assert len(answers) == KEPT_ANSWERS
    assert answers.find("k499", start + 1500) is None
    oldest, lived = kept(500, start + 500), start + 500 + KEPT_ANSWERS_S
    assert answers.find("k500", lived) == oldest
    assert answers.find("k500", lived + 1) is None
    assert answers.surplus(lived) == (DropAnswer("k500"),)  # a place for the new one
    assert answers.surplus(lived + 3) == tuple(DropAnswer(f"k{number}") for number in (500, 501, 502))
    assert len(answers.surplus(lived + 1000)) == AT_ONCE

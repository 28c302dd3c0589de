"""A running master of a collective job: trainers begin, die, join, wait for each other, load a checkpoint;
what it explains of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from master_service.core.explanation.explain import explain
from master_service.core.explanation.situation import Situation
from master_service.leadership.master import Master
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.api.client import client_of
from tests.master_service.api.explained import LONG_S, also, codes, explained, text
from tests.master_service.cluster import KEYS, MasterCluster, leading, spec_of, take
from tests.master_service.control.restoring import checkpoint, rolling_back
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import CheckpointUnusable
from trireme_shared.protocol.records import Holding, JobState, Mode, Phase, Strategy
from trireme_shared.protocol.records.operations import OperationState

SOON_S = 0.1
WINDOW_S = 0.5


def collective(**values: Any) -> MasterCluster:
    common = {
        "mode": Mode.SYNC,
        "strategy": Strategy.COLLECTIVE,
        "pservers": 0,
        "lanes": 2,
        "global_batch_size": 4,
    }
    return MasterCluster(spec_of(**(common | {"join_window_s": WINDOW_S} | values)))


def holding(state: JobState, **more: Any) -> Holding:
    return Holding(timeline=state.timeline, checkpoint=state.checkpoint, **more)


async def initialise(cluster: MasterCluster, *trainers: str) -> None:
    """The first one gives the parameters their values."""
    for trainer in trainers:
        await cluster.add_trainer(trainer)
    await cluster.etcd.put(KEYS.layout, b"{}")
    await cluster.etcd.put(KEYS.init_done, trainers[0].encode())


@asynccontextmanager
async def trained_by(cluster: MasterCluster, *trainers: str) -> AsyncIterator[Master]:
    async with leading(cluster.master()) as master:
        await initialise(cluster, *trainers)
        for trainer in trainers:
            await cluster.say(trainer, holds=Holding(timeline=0))
        await listed(master, *trainers)
        yield master


async def listed(master: Master, *trainers: str, within_s: float = 2.0) -> None:
    await until(lambda: set(master.job.trainers.names) == set(trainers), f"{trainers} to be listed", within_s)


def events(master: Master) -> list[str]:
    return [event.name for event in master.events.after(0, 1000)]


def test_a_job_begins_with_all_who_have_the_parameters_within_the_window() -> None:
    async def main() -> None:
        cluster = collective()
        async with leading(cluster.master()) as master:
            await initialise(cluster, "a", "b", "c")
            said = "waiting for a to say that it has the parameters"
            await until(lambda: master.job.state.reason == said, said)
            begun = clock.monotonic()
            for trainer in ("a", "b"):
                await cluster.say(trainer, holds=Holding(timeline=0))
                await asyncio.sleep(SOON_S)
            assert master.job.state.phase is Phase.WAITING  # `c` may have them in a moment, too
            await listed(master, "a", "b")
            assert WINDOW_S / 2 < clock.monotonic() - begun < 2 * WINDOW_S
            assert (master.job.state.generation, master.job.slots) == (1, None)
            assert (await master.acquire_task(cluster.ask(master, "a", stream=0, index=0))).answer == "task"
            await cluster.say("c", holds=Holding(timeline=0))
            await listed(master, "a", "b", "c")

    run_virtually(main)


def test_a_job_begins_at_once_if_all_who_are_there_have_the_parameters() -> None:
    async def main() -> None:
        cluster = collective(join_window_s=10)
        async with leading(cluster.master()) as master:
            await initialise(cluster, "a")
            await cluster.say("a", holds=Holding(timeline=0))
            await listed(master, "a", within_s=SOON_S)

    run_virtually(main)


@pytest.mark.parametrize("reporter", ["a", "nobody"])
def test_a_dead_trainer_that_another_one_reports_is_no_member_at_once(reporter: str) -> None:
    async def main() -> None:
        cluster = collective()
        async with trained_by(cluster, "a", "b") as master:
            cluster.dead.add("http://b")
            if reporter == "nobody":  # its lease of an hour has not run out
                await asyncio.sleep(5)
                assert set(master.job.trainers.names) == {"a", "b"}
                return
            async with client_of(master) as client:
                answer = await client.post("/v1/members/b/suspect")
            assert answer.json() == {"dead": True}
            await listed(master, "a", within_s=SOON_S)
            assert master.job.trainers.lanes_of("a") == (0, 2)
            assert master.job.state.timeline == 0
            async with client_of(master) as client:
                assert (await client.post("/v1/members/a/suspect")).json() == {"dead": False}

    run_virtually(main)


def test_below_min_members_nobody_is_listed_and_tasks_get_their_time_again() -> None:
    async def main() -> None:
        cluster = collective(min_members=2, task_timeout_floor_s=2.0)
        async with trained_by(cluster, "a", "b") as master:
            task = await take(cluster, master, "a", stream=0, index=0)
            await cluster.lose("b")
            await listed(master, within_s=SOON_S)
            assert master.job.state.phase is Phase.WAITING
            waits = await master.acquire_task(cluster.ask(master, "a", stream=0, index=0))
            assert (waits.answer, "(min_members), 1 of 1 have them" in waits.reason) == ("wait", True)
            told = await explained(master)
            assert told["code"] == "FEWER_THAN_MIN_MEMBERS"
            assert (
                told["summary"] == "1 trainers have the parameters, the job trains only with 2 (min_members)."
            )
            await asyncio.sleep(60)
            await cluster.add_trainer("c")
            await cluster.say("c", holds=holding(master.job.state))
            await listed(master, "a", "c")
            # more than its time since it was taken, less than that since the job goes on
            await asyncio.sleep(1.5)
            assert master.job.training.pending[task.task_id].record.trainer == "a"
            assert "a" in master.job.members.trainers

    run_virtually(main)


def test_nobody_is_called_slow_while_a_collective_job_waits_for_min_members() -> None:
    async def main() -> None:
        cluster = collective(min_members=2)
        async with trained_by(cluster, "a", "b") as master:
            for lane, trainer in enumerate(master.job.trainers.names):
                await take(cluster, master, trainer, stream=lane, index=0)
            await asyncio.sleep(LONG_S)
            assert "SLOW_MINIBATCH" in codes(await explained(master))
            await cluster.lose("b")
            await listed(master, within_s=SOON_S)
            await asyncio.sleep(LONG_S)
            assert {held.record.trainer for held in master.job.training.pending.values()} == {"a", "b"}
            told = await explained(master)
            assert told["code"] == "FEWER_THAN_MIN_MEMBERS"
            assert "SLOW_MINIBATCH" not in codes(told)

    run_virtually(main)


def test_who_fetches_the_parameters_is_no_member_and_is_told() -> None:
    async def main() -> None:
        cluster = collective()
        async with trained_by(cluster, "a") as master:
            await cluster.add_trainer("b")
            await until(lambda: "b" in master.job.members.trainers, "b to be registered")
            assert "TRAINERS_FETCH_PARAMETERS" in codes(await explained(master))
            assert "b fetches parameters" in text(also(await explained(master), "TRAINERS_FETCH_PARAMETERS"))
            async with client_of(master) as client:
                found = (await client.get("/v1/members")).json()["members"]
                assert [(each["member_id"], each["has_parameters"]) for each in found] == [
                    ("a", True),
                    ("b", False),
                ]
                job = (await client.get("/v1/job")).json()
            assert job["members"] == {
                "trainers": 2,
                "trainers_desired": 2,
                "pservers": 0,
                "pservers_desired": 0,
            }
            assert (job["state"], job["settings"]["strategy"]) == ("RUNNING", "collective")
            assert not any("parameter server" in text(cause) for cause in [await explained(master)])

    run_virtually(main)


# ------------------------------------------------------------------ roll-back


def test_when_all_have_died_the_job_goes_on_from_its_checkpoint_with_those_that_have_loaded_it() -> None:
    async def main() -> None:
        cluster = collective()
        async with trained_by(cluster, "a", "b") as master:
            await checkpoint(cluster, 40, 30)
            await until(lambda: master.job.members.latest, "the checkpoint to be seen")
            await cluster.lose("b")
            await listed(master, "a")
            await cluster.lose("a")
            state = await rolling_back(master, "at-40")
            assert state.reason == "all previous members have left: training continues from step 40"
            for trainer in ("c", "d", "e"):
                await cluster.add_trainer(trainer)
            await asyncio.sleep(2)
            assert text(await explained(master)).startswith("The job goes back to step 40 (checkpoint at-40)")
            await cluster.say("c", holds=holding(state, version=40))
            await asyncio.sleep(1)
            assert master.job.state == state  # others have as long again
            await cluster.say("d", holds=holding(state, version=40))
            await listed(master, "c", "d", within_s=2.5)
            assert master.job.state.phase is Phase.RUNNING
            assert master.job.training.cursors == {"0": 1, "1": 1}
            await cluster.say("e", holds=holding(state, version=41))
            await listed(master, "c", "d", "e")
            assert events(master).count("rolled_back") == 1

    run_virtually(main)


def test_a_rollback_does_not_wait_for_others_if_nobody_else_is_there() -> None:
    async def main() -> None:
        cluster = collective()
        async with trained_by(cluster, "a") as master:
            await checkpoint(cluster, 40)
            await until(lambda: master.job.members.latest, "the checkpoint to be seen")
            await cluster.lose("a")
            state = await rolling_back(master, "at-40")
            await asyncio.sleep(8)
            await cluster.add_trainer("c")
            await cluster.say("c", holds=holding(state))
            await listed(master, "c", within_s=SOON_S)

    run_virtually(main)


def test_a_checkpoint_that_no_trainer_can_load_gives_way_to_the_one_before() -> None:
    async def main() -> None:
        cluster = collective()
        async with trained_by(cluster, "a") as master:
            await checkpoint(cluster, 40, 30, 20)
            cluster.storage.manifests["at-30"] = CheckpointUnusable("manifest is damaged")
            await until(lambda: master.job.members.latest, "the checkpoints to be seen")
            await cluster.lose("a")
            state = await rolling_back(master, "at-40")
            await cluster.add_trainer("b")
            await cluster.say("b", holds=holding(state, error="part 0 is damaged"))
            last = await rolling_back(master, "at-20")
            assert last.damaged == ("at-40", "at-30")
            await cluster.say("b", holds=holding(last))
            await listed(master, "b")
            assert events(master).count("checkpoint_unusable") == 2

    run_virtually(main)


def test_a_rollback_that_nobody_loads_fails_the_job_after_its_time() -> None:
    async def main() -> None:
        cluster = collective(recovery_timeout_s=20)
        async with trained_by(cluster, "a") as master:
            await checkpoint(cluster, 40)
            await until(lambda: master.job.members.latest, "the checkpoint to be seen")
            await cluster.lose("a")
            await rolling_back(master, "at-40")
            await cluster.add_trainer("b")
            await cluster.say("b", waits="s3 does not answer")
            await until(lambda: "storage_away" in events(master), "the event")
            assert (await explained(master))["code"] == "STORAGE_UNREACHABLE"
            await until(lambda: master.job.state.phase is Phase.FAILED, "the job to fail", 30.0)
            assert (
                "0 of 1 trainers loaded the checkpoint within recovery_timeout_s 20"
                in master.job.state.reason
            )

    run_virtually(main)


# ------------------------------------------------------------------ resize


def test_trainers_are_resized_and_parameter_servers_cannot_be() -> None:
    async def main() -> None:
        cluster = collective(min_members=1, lanes=4)
        async with trained_by(cluster, "a", "b") as master:
            async with client_of(master) as client:
                servers = await client.get("/v1/resize-prediction", params={"trainers": 3, "pservers": 1})
                nobody = await client.get("/v1/resize-prediction", params={"trainers": 0})
                three = (await client.get("/v1/resize-prediction", params={"trainers": 3})).json()
            told = (
                "job j has strategy collective: its trainers have the parameters, and there are no "
                "parameter servers to resize"
            )
            assert (servers.status_code, servers.json()["detail"]) == (409, told)
            told = "0 trainers: job j trains only while 1 have the parameters (min_members)"
            assert (nobody.status_code, nobody.json()["detail"]) == (400, told)
            assert (three["trainers"], three["pservers"], three["groups"]) == (3, 0, 0)
            asked = await resize(master, trainers=3)
            await until(lambda: master.job.spec.trainers == 3, "the number to be written")
            assert (await explained(master))["also"]
            await cluster.add_trainer("c")
            await cluster.say("c", holds=Holding(timeline=0))
            await until(lambda: not master.job.operations.records[asked].running, "the resize to end")
            ended = master.job.operations.records[asked]
            assert (ended.state, ended.reason) == (OperationState.DONE, "3 trainers")

    run_virtually(main)


async def resize(master: Master, **numbers: int) -> str:
    async with client_of(master) as client:
        answer = await client.post("/v1/resizes", json=numbers)
        assert answer.status_code in (200, 201, 202), answer.text
        return str(answer.json()["operation_id"])


def test_a_resize_that_is_cancelled_wants_as_many_trainers_as_before() -> None:
    async def main() -> None:
        cluster = collective(lanes=4)
        async with trained_by(cluster, "a", "b") as master:
            asked = await resize(master, trainers=4)
            await until(lambda: master.job.spec.trainers == 4, "the number to be written")
            async with client_of(master) as client:
                assert (await client.post(f"/v1/resizes/{asked}/cancel")).status_code == 200
            ended = master.job.operations.records[asked]
            assert (ended.reason, master.job.spec.trainers) == (
                "cancelled; the job wants 2 trainers as before",
                2,
            )

    run_virtually(main)


def test_an_explanation_of_a_collective_job_says_nothing_of_parameter_servers() -> None:
    async def main() -> None:
        cluster = collective()
        async with leading(cluster.master()) as master:
            assert (await explained(master))["code"] == "NO_TRAINER"
            await cluster.add_trainer("a")
            await until(lambda: master.job.members.trainers, "the trainer")
            await cluster.etcd.put(KEYS.init_lock, b"a")
            told = await explained(master)
            assert told["summary"] == "a gives the parameters their first values."
            still = Situation(master.job, clock.monotonic(), still_s=10.0)
            assert all(
                "parameter server" not in each
                for cause in [explain(still)]
                for each in (cause.summary, *cause.details)
            )

    run_virtually(main)

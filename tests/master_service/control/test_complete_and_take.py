"""The end of a task and the next one in one request: one transaction, the same answer however often it is
asked."""

from __future__ import annotations

import asyncio

import pytest

from master_service.core.decisions import recovery
from master_service.leadership.master import Master
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.cluster import KEYS, MasterCluster, Storage, done, leading, running, spec_of, take
from trireme_shared.protocol.errors import Conflict, StaleAttempt, StaleGeneration
from trireme_shared.protocol.records import Completed, CompleteTask, Mode, TakeNext, Task


def with_next(
    master: Master, task: Task, request: str = "n1", trainer: str = "t1", ahead: int = 0
) -> CompleteTask:
    generation = master.job.state.generation + ahead
    return done(task, trainer, next=TakeNext(request=request, generation=generation))


async def turned_over(master: Master, task: Task, request: str = "n1", trainer: str = "t1") -> Task | None:
    completed: Completed = await master.complete_task(task.task_id, with_next(master, task, request, trainer))
    return completed.next


def test_the_end_of_a_task_and_the_next_one_are_one_transaction() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1") as master:
            task = await take(cluster, master)
            before = master.term.writer.commits
            following = await turned_over(master, task)
            assert following is not None
            assert following.task_id != task.task_id
            assert master.term.writer.commits == before + 1
            written = {e.kv.key: (e.type, e.kv.mod_revision) for e in cluster.simulated.events()}
            (ended, at), (begun, then) = (
                written[KEYS.pending(task.task_id)],
                written[KEYS.pending(following.task_id)],
            )
            assert (ended, begun, at) == ("delete", "put", then)
            assert master.job.training.counts == (8, 1, 1, 0)

    run_virtually(main)


def test_a_doubled_request_ends_nothing_twice_and_gets_the_same_task() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1") as master:
            task = await take(cluster, master)
            report = with_next(master, task)
            answers = await asyncio.gather(*(master.complete_task(task.task_id, report) for _ in range(3)))
            assert answers[0] == answers[1] == answers[2]
            again = await take(cluster, master, request="n1")
            assert again == answers[0].next
            assert master.job.training.counts == (8, 1, 1, 0)

    run_virtually(main)


def test_a_doubled_request_that_comes_late_takes_no_further_task() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1") as master:
            task = await take(cluster, master)
            report = with_next(master, task)
            following = (await master.complete_task(task.task_id, report)).next
            assert following is not None
            await master.complete_task(following.task_id, done(following))
            assert await master.complete_task(task.task_id, report) == Completed(next=None)
            with pytest.raises(Conflict):
                await take(cluster, master, request="n1")
            assert master.job.training.counts == (8, 0, 2, 0)

    run_virtually(main)


def test_a_stale_report_takes_no_task() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1", "t2") as master:
            task = await take(cluster, master)
            other = task.model_copy(update={"attempt": 2})
            with pytest.raises(StaleAttempt):
                await turned_over(master, other)
            with pytest.raises(StaleAttempt):
                await turned_over(master, task, trainer="t2")
            assert master.job.training.counts == (9, 1, 0, 0)

    run_virtually(main)


def test_a_refused_next_task_does_not_undo_the_end_of_the_last() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1") as master:
            task = await take(cluster, master, request="r")
            assert await turned_over(master, task, request="r") is None  # the id of another request
            task = await take(cluster, master)
            await cluster.add_trainer("t2")
            await until(lambda: "t2" in master.job.trainers.names, "t2 to join")
            await cluster.lose("t1")
            await until(lambda: "t1" not in master.job.trainers.names, "t1 to be gone")
            with pytest.raises(StaleAttempt):  # its task went back: nothing ends, nothing is taken
                await turned_over(master, task)
            assert master.job.training.counts == (9, 0, 1, 0)
            with pytest.raises(StaleGeneration):
                await take(cluster, master, trainer="t1")

    run_virtually(main)


def test_the_last_task_of_an_epoch_ends_alone() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(epochs=2), Storage(2))
        async with running(cluster, "t1") as master:
            first, second = await take(cluster, master), await take(cluster, master)
            assert await turned_over(master, first, "a") is None  # nothing is left to give
            assert await turned_over(master, second, "b") is None
            assert (await take(cluster, master, request="b")).epoch == 1

    run_virtually(main)


def test_a_task_that_goes_back_instead_of_ending_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1") as master:
            task = await take(cluster, master)
            monkeypatch.setattr(recovery, "is_outdated", lambda *_: True)
            assert await turned_over(master, task) is None
            assert list(master.job.training.requeued) == [task.task_id]

    run_virtually(main)


def test_a_reply_lost_with_the_master_is_found_at_the_next_one() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1") as first:
            task = await take(cluster, first)
            report = with_next(first, task)
            following = (await first.complete_task(task.task_id, report)).next
        async with leading(cluster.master("m2")) as second:
            # it remembers no reports, and gives nothing on the strength of one
            with pytest.raises(StaleAttempt):
                await second.complete_task(task.task_id, report)
            assert await take(cluster, second, request="n1") == following
            assert second.job.training.counts == (8, 1, 1, 0)

    run_virtually(main)


def test_lanes_ask_for_their_own_next_task() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(mode=Mode.SYNC), Storage(40))
        async with running(cluster, "t1") as master:
            task = await take(cluster, master, stream=0, index=0)
            assert await turned_over(master, task) is None
            assert (await take(cluster, master, stream=0, index=1)).index == 1

    run_virtually(main)


@pytest.mark.parametrize("seed", range(6))
def test_every_task_is_done_once_while_transactions_overtake_each_other_and_answers_are_lost(
    seed: int,
) -> None:
    """Many trainers, requests repeated after each lost answer, an etcd that is slow, unordered and
    forgetful."""

    async def main() -> None:
        names = [f"t{n}" for n in range(12)]
        cluster = MasterCluster(spec_of(epochs=2, records_per_task=1), Storage(60))
        flights = set[int]()
        ended: list[tuple[int, str]] = []
        async with running(cluster, *names) as master:
            cluster.simulated.delay_s = (0.0, 0.05)

            async def work(name: str) -> None:
                task: Task | None = None
                for number in range(10_000):
                    await asyncio.sleep((number * 5 + names.index(name) * 3) % 11 / 200)
                    flights.add(master.term.writer.under_way)
                    if number % 7 == seed and name == "t0":
                        (cluster.simulated.lose_answer if number % 2 else cluster.simulated.lose_request)(
                            client="m1"
                        )
                    request, given = f"{name}-{number}", list[Task | None]()
                    if task is not None:
                        ended.append((task.epoch, task.task_id))
                        report = with_next(master, task, request, name)
                        twice = await asyncio.gather(
                            *(master.complete_task(task.task_id, report) for _ in range(2))
                        )
                        given = [answer.next for answer in twice]
                    while not any(given):
                        answer = await master.acquire_task(cluster.ask(master, name, request=request))
                        if master.job.state.stage != "TRAIN":
                            return
                        given.append(answer.task)
                        await asyncio.sleep(answer.retry_after_s)
                    task, *others = [each for each in given if each is not None]
                    assert all(other == task for other in others)
                    if task.kind != "TRAIN":
                        return

            await asyncio.gather(*map(work, names))
            assert sorted(ended) == sorted((epoch, str(n)) for epoch in range(2) for n in range(60))
            assert 2 in flights

    run_virtually(main, seed=seed)

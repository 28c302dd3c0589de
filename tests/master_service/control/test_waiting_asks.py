"""A trainer that gets no task waits in the master: it is answered as soon as there is one, and nobody asks
over and over."""

from __future__ import annotations

import asyncio

import pytest

from master_service.core.decisions import tasks
from master_service.leadership.master import Master
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.cluster import MasterCluster, Storage, done, leading, running, spec_of, take
from tests.master_service.control.test_jobs import NO
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import NotLeader, StaleGeneration
from trireme_shared.protocol.records import AcquireTask, FailTask, TaskAnswer

WAIT_S = 10.0
AT_ONCE_S = 0.1


def asking(cluster: MasterCluster, master: Master, trainer: str) -> asyncio.Task[TaskAnswer]:
    return asyncio.ensure_future(master.acquire_task(cluster.ask(master, trainer, wait_s=WAIT_S)))


async def in_line(master: Master, count: int) -> None:
    await until(lambda: len(master.term.asks) == count, f"{count} to wait", 2.0)


def test_a_task_that_is_put_back_goes_at_once_to_the_one_that_waits_longest() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(), Storage(tasks=1))
        async with running(cluster, "t1", "t2", "t3") as master:
            task = await take(cluster, master, "t1")
            waiting = []
            for trainer in ("t2", "t3"):
                waiting.append(asking(cluster, master, trainer))
                await in_line(master, len(waiting))
            await asyncio.sleep(3.0)
            begun = clock.monotonic()
            failed = FailTask(trainer="t1", attempt=task.attempt, failure=NO, epoch=task.epoch)
            await master.fail_task(task.task_id, failed)
            answer = await waiting[0]
            assert clock.monotonic() - begun < AT_ONCE_S
            assert answer.task is not None
            assert (answer.task.task_id, answer.task.attempt) == (task.task_id, 2)
            assert not waiting[1].done()
            await master.complete_task(answer.task.task_id, done(answer.task, "t2"))
            last = await waiting[1]  # the next stage
            assert clock.monotonic() - begun < 2 * AT_ONCE_S
            assert last.task is not None
            assert last.task.task_id == "export-0"

    run_virtually(main)


def test_only_as_many_look_again_as_tasks_were_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    acquire = tasks.acquire

    def counted(*arguments: object) -> object:
        nonlocal looks
        looks += 1
        return acquire(*arguments)  # type: ignore[arg-type]

    async def main() -> None:
        nonlocal looks
        cluster = MasterCluster(spec_of(), Storage(tasks=1))
        names = [f"t{number}" for number in range(50)]
        async with running(cluster, *names) as master:
            task = await take(cluster, master, "t0")
            waiting = [asking(cluster, master, name) for name in names[1:]]
            await in_line(master, len(waiting))
            monkeypatch.setattr(tasks, "acquire", counted)
            failed = FailTask(trainer="t0", attempt=task.attempt, failure=NO, epoch=task.epoch)
            await master.fail_task(task.task_id, failed)
            await asyncio.sleep(WAIT_S / 2)
            assert looks == 1
            assert sum(each.done() for each in waiting) == 1
            for each in waiting:
                each.cancel()

    run_virtually(main)


def test_the_wait_has_a_limit_and_tells_why() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(), Storage(tasks=1))
        async with running(cluster, "t1", "t2") as master:
            await take(cluster, master, "t1")
            begun = clock.monotonic()
            answer = await asking(cluster, master, "t2")
            assert WAIT_S <= clock.monotonic() - begun < WAIT_S + AT_ONCE_S
            assert (answer.answer, answer.reason) == ("wait", "the last 1 tasks of epoch 0 are under way")

    run_virtually(main)


def test_who_is_woken_and_takes_nothing_passes_the_task_on() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(), Storage(tasks=1))
        async with running(cluster, "t1", "t2", "t3") as master:
            task = await take(cluster, master, "t1")
            gone = asking(cluster, master, "t2")
            await in_line(master, 1)
            other = asking(cluster, master, "t3")
            await in_line(master, 2)
            failed = FailTask(trainer="t1", attempt=task.attempt, failure=NO, epoch=task.epoch)
            await master.fail_task(task.task_id, failed)
            gone.cancel()
            answer = await asyncio.wait_for(other, AT_ONCE_S)
            assert answer.task is not None
            assert answer.task.task_id == task.task_id

    run_virtually(main)


def test_a_trainer_that_is_no_member_any_more_learns_it_while_it_waits() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(), Storage(tasks=1))
        async with running(cluster, "t1", "t2") as master:
            await take(cluster, master, "t1")
            waiting = asking(cluster, master, "t2")
            await in_line(master, 1)
            await cluster.lose("t2")
            with pytest.raises(StaleGeneration):
                await asyncio.wait_for(waiting, 1.0)

    run_virtually(main)


def test_the_end_of_a_term_sends_all_away_at_once_and_the_same_request_gets_its_task_at_the_successor() -> (
    None
):
    async def main() -> None:
        cluster = MasterCluster(spec_of(), Storage(tasks=1))
        async with running(cluster, "t1", "t2") as first:
            task = await take(cluster, first, "t1")
            ask = AcquireTask(
                trainer="t2", request="mine", generation=first.job.state.generation, wait_s=WAIT_S
            )
            waiting = asyncio.ensure_future(first.acquire_task(ask))
            await in_line(first, 1)
            term = first.term
            await first.etcd.revoke(term.lease.id)
            with pytest.raises(NotLeader):
                await asyncio.wait_for(waiting, 5.0)
            async with leading(cluster.master("m2")) as second:
                await until(
                    lambda: first.current_term is not None or second.current_term is not None, "a leader", 10
                )
                leader = first if first.current_term is not None else second
                failed = FailTask(trainer="t1", attempt=task.attempt, failure=NO, epoch=task.epoch)
                await leader.fail_task(task.task_id, failed)
                answer = await leader.acquire_task(ask)
                again = await leader.acquire_task(ask)
                assert answer.task is not None
                assert answer.task == again.task

    run_virtually(main)

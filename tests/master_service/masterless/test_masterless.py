"""Masterless dispatch: several trainers write one queue. Races, lost answers, the sweeper's death and its
late writes."""

from __future__ import annotations

import asyncio

import pytest

from master_service.core.changes import Decision
from master_service.core.decisions import lifecycle
from master_service.masterless.dispatcher import REMEMBERED_S, Dispatcher
from master_service.masterless.shared_job import SharedWriter
from master_service.store.writer import HeldLock, LeaderWriter
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.cluster import KEYS, Storage, done, spec_of, take
from tests.master_service.masterless.cluster import MasterlessCluster, dispatching, sweeper_of, work
from trireme_shared.platform.etcd import Compare, Etcd
from trireme_shared.protocol.errors import DatasetError, NotLeader, NotReady, StaleAttempt, StateUnreadable
from trireme_shared.protocol.records import (
    AcquireTask,
    CompleteTask,
    FailTask,
    FailureCause,
    JobState,
    MetricBatch,
    Phase,
    PserverMember,
    Stage,
    StepMetrics,
    TaskProgress,
    UserFailure,
)
from trireme_shared.protocol.records.datasets import TextLines
from trireme_shared.protocol.records.tasks import TrainerProgress

NO = UserFailure(error_type="ValueError", message="no")


def test_several_trainers_give_each_task_of_each_epoch_once() -> None:
    async def main() -> None:
        cluster = MasterlessCluster(spec_of(epochs=3), Storage(20))
        given: list = []
        async with dispatching(cluster, "t1", "t2", "t3", "t4") as dispatchers:
            await asyncio.gather(*(work(cluster, each, given, pause_s=0.01) for each in dispatchers.values()))
            assert sorted((task.epoch, int(task.task_id)) for task in given) == [
                (e, n) for e in range(3) for n in range(20)
            ]
            assert {task.attempt for task in given} == {1}
            assert sum(each.writer.losses for each in dispatchers.values()) > 0, "they never raced"
            job = [each.job for each in dispatchers.values()]
            await until(
                lambda: all(b.state.stage is Stage.EXPORT for b in [d.job for d in dispatchers.values()]),
                "news",
            )
            assert len({(b.training.epoch, tuple(b.training.pending)) for b in job}) == 1

    run_virtually(main)


def test_every_trainer_holds_what_etcd_holds() -> None:
    async def main() -> None:
        cluster = MasterlessCluster(spec_of(), Storage(30))
        async with dispatching(cluster, "t1", "t2", "t3") as dispatchers:
            for number in range(12):
                name = f"t{number % 3 + 1}"
                task = await take(cluster, dispatchers[name], name)
                if number % 4 == 0:
                    failed = FailTask(trainer=name, attempt=task.attempt, failure=NO, epoch=0)
                    await dispatchers[name].fail_task(task.task_id, failed)
                elif number % 2:
                    await dispatchers[name].complete_task(task.task_id, done(task, name))
            await asyncio.sleep(1)
            fresh = cluster.dispatcher("reader")
            reading = asyncio.ensure_future(fresh.view.run())
            await until(lambda: fresh.view.is_open, "a fresh reading")
            for each in dispatchers.values():
                assert each.view.commit_revision == fresh.view.commit_revision
                for kind, queue in each.job.queues.items():
                    other = fresh.job.queues[kind]
                    assert {t: p.record for t, p in queue.pending.items()} == {
                        t: p.record for t, p in other.pending.items()
                    }
                    assert (queue.cursors, queue.requeued, queue.discarded) == (
                        other.cursors,
                        other.requeued,
                        other.discarded,
                    )
                    assert (queue.epoch, queue.dispatched) == (other.epoch, other.dispatched)
            reading.cancel()

    run_virtually(main)


def test_a_lost_compare_decides_again_on_what_the_other_wrote() -> None:
    async def main() -> None:
        cluster = MasterlessCluster(spec_of())
        async with dispatching(cluster, "t1", "t2") as dispatchers:
            seen: list[int] = []

            def look(job, _now):
                seen.append(job.training.cursors.get("0", 0))
                return Decision(
                    None, lifecycle.fail(job.state, "to write something", FailureCause.MEMBERS).changes
                )

            one, two = dispatchers["t1"], dispatchers["t2"]
            cluster.simulated.delay_s = (0.01, 0.01)
            taking = asyncio.ensure_future(take(cluster, one, "t1"))
            await asyncio.sleep(0.001)
            await two.writer.decide(look)
            await taking
            assert seen == [0, 1]

    run_virtually(main)


def test_an_error_is_answered_only_when_no_write_of_the_others_is_missing() -> None:
    """A lane's new owner asks for a task that its own process does not know to be due yet."""

    async def main() -> None:
        cluster = MasterlessCluster(spec_of(mode="sync", lanes=2))
        async with dispatching(cluster, "t1", "t2") as dispatchers:
            one, two = dispatchers["t1"], dispatchers["t2"]
            lane, _ = one.job.trainers.lanes_of("t1")
            await take(cluster, one, "t1", stream=lane, index=0)
            await asyncio.sleep(0.1)
            two.view.hold()  # what t1 writes from here on is not folded at t2
            await take(cluster, one, "t1", stream=lane, index=1)
            two.view.held = False

            def in_order(job, _now):
                cursor = job.training.cursors.get(str(lane), 0)
                if cursor < 2:
                    raise StaleAttempt(f"only {cursor} were given")
                return Decision(cursor)

            assert await two.writer.decide(in_order) == 2

    run_virtually(main)


@pytest.mark.parametrize("lose", ["request", "answer"])
def test_a_write_without_an_answer_counts_once_though_others_commit_meanwhile(lose) -> None:
    async def main() -> None:
        cluster = MasterlessCluster(spec_of())
        async with dispatching(cluster, "t1", "t2") as dispatchers:
            one, two = dispatchers["t1"], dispatchers["t2"]
            lost = cluster.simulated.lose_answer if lose == "answer" else cluster.simulated.lose_request
            lost(client="t1", method="/kv/txn")
            first = asyncio.ensure_future(take(cluster, one, "t1"))
            await asyncio.sleep(0.01)
            other = await take(cluster, two, "t2")
            mine = await first
            assert {mine.task_id, other.task_id} == {one.job.training.streams.at(0, 0, n) for n in (0, 1)}
            assert (mine.attempt, other.attempt) == (1, 1)
            await until(lambda: set(two.job.training.pending) == {mine.task_id, other.task_id}, "news")

    run_virtually(main)


def test_a_dead_sweepers_place_is_taken_at_once_and_its_tasks_go_back() -> None:
    async def main() -> None:
        cluster = MasterlessCluster(spec_of())
        async with dispatching(cluster, "t1", "t2", "t3") as dispatchers:
            dead = sweeper_of(dispatchers)
            task = await take(cluster, dispatchers[dead], dead)
            cluster.kill(dead, cluster.running[dead])
            since = asyncio.get_running_loop().time()
            await cluster.lose(dead)
            alive = {name: each for name, each in dispatchers.items() if name != dead}
            await until(lambda: any(each.sweeps for each in alive.values()), "another sweeper")
            assert asyncio.get_running_loop().time() - since < 1.5, (
                "its port is closed: nobody waits for the lease"
            )
            await until(
                lambda: all(
                    t in each.job.training.requeued for t in [task.task_id] for each in alive.values()
                ),
                "it",
            )
            name, each = next(iter(alive.items()))
            again = await take(cluster, each, name)
            assert (again.task_id, again.attempt) == (task.task_id, 2)

    run_virtually(main)


def test_the_sweeper_reports_a_parameter_servers_storage_error_once_and_so_does_its_successor() -> None:
    async def main() -> None:
        cluster = MasterlessCluster(spec_of())
        async with dispatching(cluster, "t1", "t2") as dispatchers:
            kv = await cluster.etcd.get(KEYS.pserver(0))
            assert kv is not None
            for _ in range(2):
                member = PserverMember.model_validate_json(kv.value).model_copy(update={"trouble": "no room"})
                await cluster.etcd.put(kv.key, member.to_bytes(), kv.lease)
            await asyncio.sleep(1)
            first = sweeper_of(dispatchers)
            assert {name: told(each) for name, each in dispatchers.items()} == {
                name: ["no room"] if name == first else [] for name in dispatchers
            }
            cluster.kill(first, cluster.running[first])
            await cluster.lose(first)
            [second] = [each for name, each in dispatchers.items() if name != first]
            await until(lambda: second.sweeps, "another sweeper")
            await until(lambda: told(second) == ["no room"] * 2, "it in the log that both write")

    run_virtually(main)


def told(dispatcher: Dispatcher) -> list[str]:
    return [event.message for event in dispatcher.events.after(0, 100) if event.name == "checkpoint_failed"]


def test_a_frozen_sweepers_place_is_taken_within_a_lease() -> None:
    async def main() -> None:
        cluster = MasterlessCluster(spec_of())
        async with dispatching(cluster, "t1", "t2") as dispatchers:
            old = sweeper_of(dispatchers)
            cluster.simulated.cut(old)
            other = next(each for name, each in dispatchers.items() if name != old)
            since = asyncio.get_running_loop().time()
            await until(lambda: other.sweeps, "another sweeper", 20)
            assert asyncio.get_running_loop().time() - since < 3.0 + 0.5 + 1.0
            assert not dispatchers[old].sweeps
            cluster.simulated.mend(old)

    run_virtually(main)


@pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "without the fence"])
def test_a_late_write_of_a_former_sweeper_is_refused(fenced, monkeypatch) -> None:
    if not fenced:
        unfenced = lambda self, _: [Compare.mod(KEYS.commit, "==", self._view.commit_revision)]  # noqa: E731
        monkeypatch.setattr(SharedWriter, "fence", unfenced)

    async def main() -> None:
        cluster = MasterlessCluster(spec_of())
        async with dispatching(cluster, "t1", "t2") as dispatchers:
            one = dispatchers["t1"]
            lock = await cluster.etcd.get(KEYS.sweep_lock)
            lease = await Etcd(cluster.simulated.transport("t1")).grant(60)
            deposed = LeaderWriter(
                cluster.etcd, KEYS, one.writer, HeldLock(KEYS.sweep_lock, lock.create_revision - 1, lease)
            )
            late = asyncio.ensure_future(
                deposed.decide(
                    lambda job, _: lifecycle.fail(job.state, "a late decision", FailureCause.MEMBERS)
                )
            )
            await asyncio.wait([late])
            state = JobState.model_validate_json((await cluster.etcd.get(KEYS.state)).value)
            assert (state.phase is Phase.RUNNING) is fenced
            assert isinstance(late.exception(), NotLeader) is fenced
            await take(cluster, one, "t1") if fenced else None  # its own decisions go on

    run_virtually(main)


def test_a_held_lock_whose_lease_is_over_writes_nothing() -> None:
    async def main() -> None:
        cluster = MasterlessCluster(spec_of())
        async with dispatching(cluster, "t1") as dispatchers:
            one = dispatchers["t1"]
            lock = await cluster.etcd.get(KEYS.sweep_lock)
            lease = await cluster.etcd.grant(2)
            await asyncio.sleep(3)
            with pytest.raises(NotLeader):
                await LeaderWriter(
                    cluster.etcd, KEYS, one.writer, HeldLock(KEYS.sweep_lock, lock.create_revision, lease)
                ).decide(lambda job, _: lifecycle.fail(job.state, "late", FailureCause.MEMBERS))
            assert one.job.state.phase is Phase.RUNNING

    run_virtually(main)


def test_progress_of_another_trainer_keeps_its_task_from_expiring() -> None:
    async def main() -> None:
        cluster = MasterlessCluster(spec_of(task_timeout_floor_s=4.0, task_timeout_ceiling_s=8.0), Storage(3))
        async with dispatching(cluster, "t1", "t2") as dispatchers:
            worker = next(name for name, each in dispatchers.items() if not each.sweeps)
            mine = dispatchers[worker]
            task = await take(cluster, mine, worker)
            for minibatches in range(1, 11):
                await asyncio.sleep(3)
                report = TaskProgress(trainer=worker, attempt=1, minibatches=minibatches, epoch=0)
                await mine.report_progress(task.task_id, report)
            assert mine.job.training.pending[task.task_id].record.attempt == 1
            await until(lambda: mine.job.training.requeued, "the silence to be noticed", 20)
            with pytest.raises(StaleAttempt):
                await mine.complete_task(task.task_id, done(task, worker))

    run_virtually(main)


def test_the_progress_of_a_trainer_that_leaves_is_kept_for_a_while() -> None:
    async def main() -> None:
        cluster = MasterlessCluster(spec_of())
        async with dispatching(cluster, "t1", "t2") as dispatchers:
            share = StepMetrics(step=3, epoch=0, loss_sum=6.0, records=4)
            await dispatchers["t2"].report_metrics(MetricBatch(trainer="t2", steps=(share,)))
        told = (await cluster.etcd.range(KEYS.progresses, prefix=True)).kvs
        assert [kv.key for kv in told] == [KEYS.progress("t2")]
        said = TrainerProgress.model_validate_json(told[0].value)
        assert (said.loss_sum, said.records, said.step) == (6.0, 4, 3)
        await asyncio.sleep(REMEMBERED_S + 5)
        assert not (await cluster.etcd.range(KEYS.progresses, prefix=True)).kvs

    run_virtually(main)


def test_an_etcd_that_is_away_only_delays() -> None:
    async def main() -> None:
        cluster = MasterlessCluster(spec_of())
        async with dispatching(cluster, "t1", "t2") as dispatchers:
            cluster.simulated.stop()
            asking = [asyncio.ensure_future(take(cluster, each, name)) for name, each in dispatchers.items()]
            await asyncio.sleep(10)
            assert not any(each.done() for each in asking)
            cluster.simulated.start()
            assert len({task.task_id for task in await asyncio.gather(*asking)}) == 2
            await until(lambda: any(each.sweeps for each in dispatchers.values()), "a sweeper")

    run_virtually(main)


def test_a_dataset_that_cannot_be_read_fails_the_job_with_the_reason() -> None:
    async def main() -> None:
        cluster = MasterlessCluster(spec_of(), Storage(error=DatasetError("no such file")))
        dispatcher = cluster.dispatcher("t1")
        stopping = asyncio.Event()
        running = asyncio.ensure_future(dispatcher.run(stopping))
        await asyncio.sleep(2)
        state = JobState.model_validate_json((await cluster.etcd.get(KEYS.state)).value)
        assert (state.phase, state.reason) == (Phase.FAILED, "no such file")
        with pytest.raises(NotReady):
            await dispatcher.acquire_task(AcquireTask(trainer="t1", request="r", generation=0))
        stopping.set()
        await running

    run_virtually(main)


def test_the_job_ends_with_evaluation_and_export_written_by_trainers() -> None:
    async def main() -> None:
        cluster = MasterlessCluster(spec_of(evaluation_dataset=TextLines("test.txt")), Storage(4))
        async with dispatching(cluster, "t1", "t2") as dispatchers:
            await asyncio.gather(*(work(cluster, each, []) for each in dispatchers.values()))

            async def finish(name, each):
                while not each.job.state.phase.final:
                    answer = await each.acquire_task(cluster.ask(each, name))
                    if answer.task is None:
                        await asyncio.sleep(0.05)
                        continue
                    report = CompleteTask(
                        trainer=name, attempt=answer.task.attempt, sums={"n": 1.0}, exports={"x": "y"}
                    )
                    await each.complete_task(answer.task.task_id, report)

            await asyncio.gather(*(finish(name, each) for name, each in dispatchers.items()))
            state = dispatchers["t1"].job.state
            assert (state.phase, state.stage) == (Phase.COMPLETED, Stage.DONE)
            assert (state.result.trained_records, state.result.exports) == (40, {"x": "y"})

    run_virtually(main)


def test_the_same_user_error_at_two_trainers_before_the_first_step_fails_the_job() -> None:
    async def main() -> None:
        cluster = MasterlessCluster(spec_of())
        async with dispatching(cluster, "t1", "t2") as dispatchers:
            for name, each in dispatchers.items():
                await each.report_failure(name, NO)
                await asyncio.sleep(0.1)
            state = JobState.model_validate_json((await cluster.etcd.get(KEYS.state)).value)
            assert (state.phase, state.reason) == (
                "FAILED",
                "ValueError twice before a step was known to be done: no",
            )

    run_virtually(main)


def test_requests_to_a_trainer_that_left_are_refused() -> None:
    async def main() -> None:
        cluster = MasterlessCluster(spec_of())
        async with dispatching(cluster, "t1") as dispatchers:
            left = dispatchers["t1"]
            asking = cluster.ask(left, "t1")
        with pytest.raises(NotLeader):
            await left.acquire_task(asking)

    run_virtually(main)


def test_a_queue_that_cannot_be_read_ends_every_trainer_with_an_error() -> None:
    async def main() -> None:
        cluster = MasterlessCluster(spec_of(), Storage(20))
        with pytest.raises(ExceptionGroup):
            async with dispatching(cluster, "t1", "t2"):
                await cluster.etcd.put(KEYS.pending("3"), b"7 or so")
                await asyncio.wait(cluster.running.values())
                ends = [life.exception() for life in cluster.running.values()]
        for group in ends:
            assert isinstance(group, ExceptionGroup)
            (error,) = group.exceptions
            assert isinstance(error, StateUnreadable)
            assert f"{KEYS.pending('3')} in etcd cannot be understood: b'7 or so'" in error.message

    run_virtually(main)

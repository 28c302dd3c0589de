"""Many masters, one job: take-overs, fencing, group commit, unknown outcomes, and how little is stored."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from master_service.core.decisions import lifecycle
from master_service.leadership.election import run_under_lease
from master_service.leadership.master import Master
from master_service.store.schema import MAX_OPERATIONS
from master_service.store.writer import MasterWriter
from tests.equipment.queue_violations import violations
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.cluster import (
    KEYS,
    MasterCluster,
    Storage,
    done,
    finish_training,
    leading,
    running,
    spec_of,
    take,
)
from trireme_shared.platform.etcd import Compare, Etcd
from trireme_shared.platform.etcd.operations import RangeResult
from trireme_shared.platform.etcd.reading import read_below
from trireme_shared.protocol.errors import NotLeader, NotReady, StateUnreadable
from trireme_shared.protocol.records import (
    FailureCause,
    JobSpec,
    MasterAddress,
    Mode,
    Phase,
    Stage,
    UserFailure,
)
from trireme_shared.protocol.records.assignments import GivenNumbers

NO = UserFailure(error_type="ValueError", message="no")


# ------------------------------------------------------------------ take-over


def test_a_new_master_goes_on_where_the_last_one_died() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        finished: list[str] = []
        async with running(cluster, "t1") as first:
            for _ in range(4):
                task = await take(cluster, first)
                await first.complete_task(task.task_id, done(task))
                finished.append(task.task_id)
            held = await take(cluster, first, request="lost reply")
        async with leading(cluster.master("m2")) as second:
            assert second.job.state.generation == 1
            again = await take(cluster, second, request="lost reply")
            assert again == held
            await second.complete_task(held.task_id, done(held))
            finished.append(held.task_id)
            rest = await finish_training(cluster, second)
            assert len(rest) == 5
            assert {f"0/{task_id}" for task_id in finished} | rest == {f"0/{n}" for n in range(10)}

    run_virtually(main)


def test_a_take_over_gives_every_pending_task_a_fresh_full_deadline() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(task_timeout_floor_s=5.0, task_timeout_ceiling_s=20.0))
        async with running(cluster, "t1") as first:
            await take(cluster, first)
            await asyncio.sleep(18)
        async with leading(cluster.master("m2")) as second:
            await asyncio.sleep(18)
            assert len(second.job.training.pending) == 1
            await until(lambda: second.job.training.requeued, "the deadline", 10)

    run_virtually(main)


def test_a_standby_names_the_leader_and_leads_at_once_when_it_stops() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        standby = cluster.master("m2")
        stopping = asyncio.Event()
        async with running(cluster, "t1") as leader:
            waiting = asyncio.ensure_future(standby.run(stopping))
            await asyncio.sleep(1)
            with pytest.raises(NotLeader) as caught:
                _ = standby.job
            assert caught.value.details == {"leader": "http://m1", "retry_after_s": 0}
            term = leader.term.number
        before = asyncio.get_running_loop().time()
        await until(lambda: standby.current_term is not None, "the standby to lead")
        assert asyncio.get_running_loop().time() - before < 1.0
        assert standby.term.number > term
        stored = await cluster.etcd.get(KEYS.master_address)
        assert stored is not None
        assert MasterAddress.model_validate_json(stored.value) == MasterAddress(
            url="http://m2", term=standby.term.number
        )
        stopping.set()
        await waiting

    run_virtually(main)


def test_a_dead_leaders_lease_is_revoked_by_a_candidate_that_finds_its_port_closed() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        lost = asyncio.ensure_future(cluster.master("m1").run(asyncio.Event()))
        await asyncio.sleep(1)
        cluster.simulated.cut("m1")
        lost.cancel()
        await asyncio.wait([lost])
        cluster.dead.add("http://m1")
        before = asyncio.get_running_loop().time()
        async with leading(cluster.master("m2")):
            assert asyncio.get_running_loop().time() - before < 1.0

    run_virtually(main)


def test_a_cancelled_caller_gets_its_cancellation_even_if_the_work_fails_meanwhile() -> None:
    async def work(_lease) -> None:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            raise NotLeader("this term has ended") from None

    async def main() -> None:
        cluster = MasterCluster(spec_of())
        serving = asyncio.ensure_future(run_under_lease(cluster.etcd, 3.0, asyncio.Event(), work))
        await asyncio.sleep(1)
        serving.cancel()
        await asyncio.wait([serving], timeout=30)
        assert serving.cancelled()

    run_virtually(main)


def test_another_spec_under_the_same_name_is_refused() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with leading(cluster.master()):
            pass
        cluster.spec = spec_of(epochs=7)
        with pytest.raises(Exception, match="exists with another spec: epochs is 1 there and 7 here"):
            await cluster.master("m2").run(asyncio.Event())

    run_virtually(main)


def test_a_job_that_is_started_again_after_an_edit_gets_the_new_digests_also_after_a_resize() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(sources={"s.py": "old"}))
        async with leading(cluster.master()):
            pass
        resized = spec_of(sources={"s.py": "old"}, trainers=5)
        await cluster.etcd.put(KEYS.spec, resized.to_bytes())
        given = GivenNumbers(trainers=cluster.spec.trainers, pservers=cluster.spec.pservers)
        await cluster.etcd.put(KEYS.given, given.to_bytes())
        cluster.spec = spec_of(sources={"s.py": "new"})
        async with leading(cluster.master("m2")):
            stored = await cluster.etcd.get(KEYS.spec)
            assert JobSpec.model_validate_json(stored.value) == resized.model_copy(
                update={"sources": {"s.py": "new"}}
            )

    run_virtually(main)


@pytest.mark.parametrize(
    "key", [KEYS.state, KEYS.spec, KEYS.task_meta, KEYS.pending("3"), KEYS.cursor("nowhere")]
)
def test_a_job_that_cannot_be_read_is_refused(key: str) -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with leading(cluster.master()):
            pass
        await cluster.etcd.put(key, b"7 or so")
        with pytest.raises(StateUnreadable, match=f"{key} in etcd cannot be understood: b'7 or so'"):
            await cluster.master("m2").run(asyncio.Event())

    run_virtually(main)


class CompactingEtcd(Etcd):
    """Its history is deleted after the first page of each of the first `times` readings."""

    times = 3

    async def range(self, *args: Any, **options: Any) -> RangeResult:
        page = await super().range(*args, **options)
        if page.more and not options.get("revision") and self.times:
            self.times -= 1
            await self.put("/elsewhere", b"x")
            await self.compact(page.revision + 1)
        return page


def test_history_that_is_deleted_between_two_pages_begins_the_reading_again() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1") as first:
            held = await take(cluster, first)
        etcd = CompactingEtcd(cluster.simulated.transport("m2"))
        found, revision = await read_below(etcd, KEYS.prefix, 3)
        assert etcd.times == 0
        assert KEYS.pending(held.task_id) in found
        assert max(kv.mod_revision for kv in found.values()) <= revision
        etcd.times = 100
        with pytest.raises(NotReady, match="deleted the history of /trireme/j/ 5 times"):
            await read_below(etcd, KEYS.prefix, 3)

    run_virtually(main)


# ------------------------------------------------------------------ fencing


def test_a_master_without_its_lock_writes_nothing_and_steps_down() -> None:
    """It believes in its lease (its clock stood still), while another one leads already."""

    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1") as old:
            writer = old.term.writer
            lock = await cluster.etcd.get(KEYS.master_lock)
            assert lock is not None
            await cluster.etcd.delete(KEYS.master_lock)
            async with leading(cluster.master("m2")) as new:
                before = cluster.simulated.revision
                with pytest.raises(NotLeader):
                    await writer.decide(
                        lambda job, _: lifecycle.fail(job.state, "an old master", FailureCause.MEMBERS)
                    )
                written = [e.kv.key for e in cluster.simulated.events() if e.kv.mod_revision > before]
                assert KEYS.state not in written
                assert new.job.state.phase is Phase.RUNNING

    run_virtually(main)


def test_without_the_fence_an_old_master_would_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ablation of the test above."""

    def unfenced(_: MasterWriter, _after: bytes) -> list[Compare]:
        return []

    monkeypatch.setattr(MasterWriter, "fence", unfenced)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_a_master_without_its_lock_writes_nothing_and_steps_down()


@pytest.mark.parametrize("lose", ["answer", "request"])
def test_a_commit_whose_outcome_is_unknown_lands_exactly_once(lose: str) -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1") as master:
            if lose == "answer":
                cluster.simulated.lose_answer(client="m1", method=None)
            else:
                cluster.simulated.lose_request(client="m1", method=None)
            task = await take(cluster, master)
            puts = [
                e
                for e in cluster.simulated.events()
                if e.kv.key == KEYS.pending(task.task_id) and e.type == "put"
            ]
            assert len(puts) == 1
            await master.complete_task(task.task_id, done(task))
            assert master.job.training.counts == (9, 0, 1, 0)

    run_virtually(main)


def test_transitions_that_wait_for_etcd_share_the_next_transaction() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(), Storage(200))
        cluster.simulated.delay_s = (0.01, 0.01)
        async with running(cluster, "t1") as master:
            before = master.term.writer.commits
            tasks = await asyncio.gather(*(take(cluster, master) for _ in range(90)))
            assert len({task.task_id for task in tasks}) == 90
            dispatches = master.term.writer.commits - before
            assert dispatches <= 1 + -(-90 * 2 // (MAX_OPERATIONS - 1))
            await asyncio.gather(*(master.complete_task(task.task_id, done(task)) for task in tasks))
            assert master.job.training.counts == (110, 0, 90, 0)

    run_virtually(main)


def test_an_etcd_outage_delays_answers_and_loses_nothing() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1") as master:
            task = await take(cluster, master)
            cluster.simulated.stop()
            late = asyncio.ensure_future(master.complete_task(task.task_id, done(task)))
            await asyncio.sleep(1.0)
            assert not late.done()
            cluster.simulated.start()
            await late
            assert master.job.training.counts == (9, 0, 1, 0)

    run_virtually(main)


def test_a_master_cut_off_fences_itself_before_its_lease_can_end() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1") as master:
            cluster.simulated.cut("m1")
            with pytest.raises(NotLeader):
                await master.acquire_task(cluster.ask(master))
            with pytest.raises(NotLeader):
                _ = master.job
            async with leading(cluster.master("m2")) as second:
                await take(cluster, second)
            cluster.simulated.mend("m1")
            await until(lambda: master.current_term is not None, "m1 to lead again")

    run_virtually(main)


def test_random_masters_and_kills_finish_every_task_once() -> None:
    """Masters are stopped and started at random while a trainer works through the epochs."""

    async def main() -> None:
        cluster = MasterCluster(spec_of(epochs=3), Storage(7))
        cluster.simulated.delay_s = (0.0, 0.01)
        finished: list[str] = []
        async with running(cluster, "t1"):
            pass
        round_number = 0
        while len(finished) < 21:
            round_number += 1
            async with leading(cluster.master(f"m{round_number}")) as master:
                for _ in range(round_number % 3 + 1):
                    if master.job.state.stage is not Stage.TRAIN:
                        break
                    task = await take(cluster, master)
                    if round_number % 2:
                        await master.complete_task(task.task_id, done(task))
                        finished.append(f"{task.epoch}/{task.task_id}")
                    else:
                        await cluster.lose("t1")
                        await until(lambda: master.job.trainers.names == (), "t1 to be gone")
                        await cluster.add_trainer("t1")
                        await until(lambda: master.job.trainers.names == ("t1",), "t1 to be back")
                assert list(violations(master.job.training)) == []
        assert sorted(finished) == sorted(f"{epoch}/{n}" for epoch in range(3) for n in range(7))

    run_virtually(main)


# ------------------------------------------------------------------ size


def test_a_million_tasks_keep_the_state_in_etcd_under_64_kib() -> None:
    async def main() -> None:
        cluster = MasterCluster(
            spec_of(mode=Mode.SYNC, lanes=256, global_batch_size=256, records_per_task=1), Storage(1_000_000)
        )
        async with running(cluster, "t1") as master:
            for index in range(3):
                await asyncio.gather(
                    *(take(cluster, master, stream=lane, epoch=0, index=index) for lane in range(256))
                )
            assert master.job.training.counts[2] == 512
            assert cluster.simulated.size_bytes(KEYS.tasks) < 64 * 1024
            assert cluster.simulated.size_bytes(KEYS.prefix) < 80 * 1024

    run_virtually(main)


@pytest.mark.processes
async def test_a_million_tasks_keep_the_state_in_a_real_etcd_under_64_kib(real_etcd: Etcd) -> None:
    cluster = MasterCluster(
        spec_of(mode=Mode.SYNC, lanes=64, global_batch_size=64, records_per_task=1), Storage(1_000_000)
    )
    cluster.etcd = real_etcd
    master = Master(
        real_etcd,
        KEYS,
        name="m1",
        url="http://m1",
        spec=cluster.spec,
        storage=lambda _: cluster.storage,
        probe=nobody_refuses,
    )
    async with leading(master):
        await cluster.initialise("t1")
        await until(lambda: master.job.trainers.names == ("t1",), "the job to run", 10)
        for index in range(3):
            await asyncio.gather(
                *(take(cluster, master, stream=lane, epoch=0, index=index) for lane in range(64))
            )
        found = await real_etcd.range(KEYS.tasks, prefix=True)
        size = sum(len(kv.key) + len(kv.value) for kv in found.kvs)
        assert master.job.training.counts[2] == 128
        assert size < 64 * 1024, size


async def nobody_refuses(_: str) -> bool:
    return False

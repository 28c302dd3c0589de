"""Failures and metrics are taken from trainers of the job only, about themselves, and only if they can be
true."""

from __future__ import annotations

from typing import Any

import pytest

from master_service.leadership.master import Master
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.cluster import KEYS, MasterCluster, Storage, running, spec_of
from tests.master_service.control.restoring import checkpoint, rolling_back, spec
from trireme_shared.protocol.errors import InvalidArgument, LayoutMismatch, NotFound
from trireme_shared.protocol.records import MetricBatch, Mode, Phase, StepMetrics, UserFailure

FAILURE = UserFailure(error_type="ValueError", message="no")


@pytest.mark.parametrize(
    ("member", "failure", "error"),
    [
        ("stranger", FAILURE, NotFound),
        ("pserver-0", FAILURE, NotFound),
        ("t1", FAILURE.model_copy(update={"trainer": "t2"}), InvalidArgument),
        ("t1", UserFailure(error_type=" ", message=""), InvalidArgument),
    ],
)
def test_a_failure_that_no_trainer_had_costs_the_job_nothing(
    member: str, failure: UserFailure, error: type[Exception]
) -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1", "t2") as master:
            for _ in range(3):
                with pytest.raises(error):
                    await master.report_failure(member, failure)
            assert master.job.budget.counts.total == 0
            assert master.job.state.phase is Phase.RUNNING
            assert "user_failure" not in [event.name for event in master.events.after(0, 1000)]

    run_virtually(main)


def test_a_trainer_that_is_starting_may_report_its_failure() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1") as master:
            await cluster.etcd.put(KEYS.starting("t9"), b"failed", (await cluster.etcd.grant(30)).id)
            await master.report_failure("t9", FAILURE)
            assert master.job.budget.counts.total == 1

    run_virtually(main)


def report(master: Master, trainer: str = "t1", **values: Any) -> Any:
    share = {"step": 1, "epoch": 0, "loss_sum": 1.0, "records": 4} | values
    return master.report_metrics(MetricBatch(trainer=trainer, steps=(StepMetrics(**share),)))


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.ASYNC])
def test_metrics_are_taken_of_steps_that_the_job_can_have(mode: Mode) -> None:
    """Ten tasks of ten records. Synchronous: four lanes with three tasks at most, of five minibatches each.
    Asynchronous: two minibatches each."""

    async def main() -> None:
        cluster = MasterCluster(spec_of(mode=mode, epochs=3), Storage(10))
        last = 3 * (15 if mode is Mode.SYNC else 20)
        async with running(cluster, "t1") as master:
            for trainer in ("stranger", "pserver-0"):
                with pytest.raises(NotFound):
                    await report(master, trainer)
            impossible: list[dict[str, Any]] = [
                {"step": last}, {"step": 10**12}, {"step": -1}, {"epoch": 1}, {"epoch": -1}, {"records": 101},
                {"records": -1}, {"loss_sum": float("nan")},
            ]  # fmt: skip
            for values in impossible:
                with pytest.raises(InvalidArgument):
                    await report(master, **values)
            assert (master.metrics.step, master.metrics.records, master.metrics.epochs) == (None, 0, {})
            await report(master, step=last - 1)
            assert (master.metrics.step, master.metrics.records) == (last, 4)

    run_virtually(main)


def test_steps_that_a_rollback_undid_do_not_count_however_late_they_are_reported() -> None:
    """By a trainer that was frozen, or that no message reached."""

    async def main() -> None:
        cluster = MasterCluster(spec(), Storage(10))
        async with running(cluster, "t1", "t2") as master:
            await checkpoint(cluster, 2)
            await until(lambda: master.job.members.latest, "the checkpoint to be seen")
            await report(master, step=5)
            await master.term.operations.restore_checkpoint("k", "a test", "at-2")
            state = await rolling_back(master, "at-2")
            for index in range(2):
                await cluster.restore(index, state)
            await until(lambda: master.job.state.phase is Phase.RUNNING, "the job to run again")
            assert (master.metrics.step, master.metrics.records) == (2, 4)
            await report(master, step=6)
            assert (master.metrics.step, master.metrics.records) == (2, 4)
            await report(master, step=2, timeline=master.job.state.timeline)
            assert (master.metrics.step, master.metrics.records) == (3, 8)

    run_virtually(main)


ANOTHER_MODEL = UserFailure(error_type=LayoutMismatch.code, message="this trainer's model is not the job's")


def test_another_model_than_the_jobs_counts_only_if_nobody_else_trains() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(max_user_failures=2))
        async with running(cluster, "t1", "t2") as master:
            for _ in range(5):
                await master.report_failure("t2", ANOTHER_MODEL)
            assert (master.job.state.phase, master.job.budget.counts.total) == (Phase.RUNNING, 0)
            assert [event.name for event in master.events.after(0, 1000)].count("user_failure") == 5, (
                "it is told"
            )
            await cluster.lose("t1")
            await until(lambda: "t1" not in master.job.members.trainers, "t1 to be gone")
            for _ in range(2):
                await master.report_failure("t2", ANOTHER_MODEL)
            assert master.job.state.phase is Phase.FAILED
            assert "this trainer's model is not the job's" in master.job.state.reason

    run_virtually(main)

"""Failures and metrics are taken from trainers of the job only, about themselves, and only if they can be true."""

from __future__ import annotations

from typing import Any

import pytest

from master_service.leadership.master import Master
from shared.errors import InvalidArgument, NotFound
from shared.records import MetricBatch, Mode, Phase, StepMetrics, UserFailure
from tests.equipment.virtual_loop import run_virtually
from tests.master_service.cluster import KEYS, MasterCluster, Storage, running, spec_of

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
    """Ten tasks of ten records. Synchronous: four lanes with three tasks at most, of five minibatches each. Asynchronous: two
    minibatches each."""

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

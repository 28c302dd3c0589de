"""Nothing that is sent to a master makes a transaction that etcd refuses: it would end the term, and every
successor's."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import pytest

from master_service.core.changes import Decision
from master_service.core.decisions.operations import MAX_RUNNING
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.cluster import KEYS, MasterCluster, Storage, done, leading, running, spec_of, take
from tests.master_service.control.restoring import checkpoint, spec
from trireme_shared.protocol.errors import Conflict, TooLarge
from trireme_shared.protocol.records import FailTask, Phase, Stage, UserFailure
from trireme_shared.protocol.records.checkpoints import CheckpointRef
from trireme_shared.protocol.records.datasets import TextLines
from trireme_shared.protocol.records.operations import Operation, OperationKind, OperationState
from trireme_shared.protocol.records.record import MESSAGE_CHARACTERS

LONG = "x" * 900_000


def an_operation(number: int, reason: str = "") -> Operation:
    return Operation(
        operation_id=f"op-{number}", kind=OperationKind.VERIFY_CHECKPOINT, reason=reason, limit_s=600.0
    )


class SilentStorage(Storage):
    """Never answers."""

    async def verify(self, ref: CheckpointRef) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("where", ["in a task", "outside"])
def test_a_long_error_message_reported_twice_fails_the_job_and_not_its_master(where: str) -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(max_discarded_fraction=0.0))
        async with running(cluster, "t1") as master:
            term = master.term.number
            for _ in range(2):
                failure = UserFailure(
                    error_type="ValueError", message=LONG, traceback=f"first line\n{LONG}\nlast line"
                )
                if where == "outside":
                    await master.report_failure("t1", failure)
                else:
                    task = await take(cluster, master)
                    await master.fail_task(
                        task.task_id, FailTask(trainer="t1", attempt=task.attempt, failure=failure)
                    )
            state = master.job.state
            assert (state.phase, master.term.number) == (Phase.FAILED, term)
            assert state.failure is not None
            assert len(state.failure.message) <= MESSAGE_CHARACTERS
            assert "characters are left out" in state.failure.message
            assert state.failure.traceback.startswith("first line\n")
            assert state.failure.traceback.endswith("\nlast line")
        async with leading(cluster.master("m2")) as second:
            assert second.job.state == state

    run_virtually(main)


def test_verifications_are_bounded_in_number_and_all_end_in_the_same_term() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec(), SilentStorage())
        async with running(cluster, "t1") as master:
            await checkpoint(cluster, 40)
            await until(lambda: master.job.members.latest, "the checkpoint to be seen")
            term, begun = master.term.number, list[Operation]()
            for number in range(180):
                with contextlib.suppress(Conflict):
                    begun.append(
                        await master.term.operations.verify_checkpoint(f"k{number}", "a test", "at-40")
                    )
            with pytest.raises(Conflict, match=f"{MAX_RUNNING} verifications run or wait already"):
                await master.term.operations.verify_checkpoint("one more", "a test", "at-40")
            assert len(begun) == MAX_RUNNING
            await asyncio.sleep(595)
            await until(lambda: not master.job.operations.running(), "the limits of all operations", 60)
            assert master.term.number == term
            assert {master.term.operations.get(each.operation_id).state for each in begun} == {
                OperationState.FAILED
            }

    run_virtually(main)


def test_a_master_that_finds_more_operations_than_fit_into_a_transaction_ends_them_in_parts() -> None:
    """An earlier version took as many as were sent."""

    async def main() -> None:
        cluster = MasterCluster(spec(), SilentStorage())
        async with running(cluster, "t1"):
            await checkpoint(cluster, 40)
        for number in range(180):
            operation = an_operation(number).model_copy(update={"checkpoint_id": "at-40"})
            await cluster.etcd.put(KEYS.operation(operation.operation_id), operation.to_bytes())
        async with leading(cluster.master("m2")) as second:
            term = second.term.number
            await asyncio.sleep(595)
            await until(lambda: not second.job.operations.running(), "the limits of all operations", 60)
            await second.term.operations.verify_checkpoint("one more", "a test", "at-40")
            assert second.term.number == term

    run_virtually(main)


def test_decisions_too_large_for_one_transaction_are_committed_in_several() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1") as master:
            writer = master.term.writer
            before = writer.commits

            def put(number: int) -> Decision[int]:
                return Decision(number, (an_operation(number, "x" * 200_000),))

            each = [writer.decide(lambda _job, _now, number=number: put(number)) for number in range(8)]
            assert await asyncio.gather(*each) == list(range(8))
            assert 4 <= writer.commits - before <= 5
            assert len((await cluster.etcd.range(KEYS.operations, prefix=True)).kvs) == 8

    run_virtually(main)


@dataclass
class Oversized:
    """Changes that no transaction takes: too many bytes, or too many operations."""

    name: str
    changes: tuple[Operation, ...]


@pytest.mark.parametrize(
    "oversized",
    [
        Oversized("bytes", (an_operation(0, LONG),)),
        Oversized("operations", tuple(an_operation(number) for number in range(120))),
    ],
    ids=lambda each: each.name,
)
def test_a_decision_that_no_transaction_takes_is_refused_and_the_master_goes_on(oversized: Oversized) -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1") as master:
            term = master.term
            with pytest.raises(TooLarge, match=r"job's state( by \d+ bytes)?, at most \d+"):
                await term.writer.decide(lambda _job, _now: Decision(None, oversized.changes))
            assert not master.job.operations.records
            task = await take(cluster, master)
            await master.complete_task(task.task_id, done(task))
            assert master.term is term

    run_virtually(main)


def test_sums_that_grow_too_large_are_refused_to_their_trainer_only() -> None:
    """Each report is within the limits; together they are not."""

    async def main() -> None:
        cluster = MasterCluster(spec_of(evaluation_dataset=TextLines("test.txt")), Storage(3))
        async with running(cluster, "t1") as master:
            while master.job.state.stage is Stage.TRAIN:
                task = await take(cluster, master)
                await master.complete_task(task.task_id, done(task))
            term = master.term
            refused = 0
            for number in range(3):
                task = await take(cluster, master)
                sums = {f"{number}/{name}".ljust(200, "x"): 1.0 for name in range(400)}
                try:
                    await master.complete_task(task.task_id, done(task, sums=sums))
                except TooLarge:
                    refused += 1
            assert refused == 1
            assert master.term is term

    run_virtually(main)


@pytest.mark.parametrize("field", ["trainer", "request"])
def test_ids_beyond_their_bound_are_refused_at_entry(field: str) -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1") as master:
            with pytest.raises(ValueError, match="at most 200 characters"):
                cluster.ask(master, **{"trainer": "t1", field: "x" * 201})

    run_virtually(main)
